"""The sizes of a run, from a build that has no values: the same as those of the run itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.errors import ConfigError
from ddp_train.training.build.dry_build import Sizes, layer_table, measure
from ddp_train.training.check.memory import estimate_checkpoint, memory_by_part
from tests.unit.parts import checked, components


@pytest.fixture(autouse=True)
def optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `measure` a method to change: it is made for a process of its own."""
    monkeypatch.setattr(Optimizer, "add_param_group", Optimizer.add_param_group)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=convnet", "optimizer=sgd"),
        ("optimizer=muon", "trainer.max_steps=7"),
        ("trainer.global_batch_size=100", "loader.num_workers=2"),
    ],
)
def test_they_are_those_of_the_run_itself(overrides: tuple[str, ...]) -> None:
    sizes, parts = measure(checked(*overrides)), components(*overrides)
    parameters = [parameter.numel() for parameter in parts.model.parameters()]
    assert sizes == Sizes(
        model=type(parts.model).__name__,
        layers=[],
        parameters=sum(parameters),
        trained_parameters=sum(parameters),
        steps=parts.total_steps,
        steps_per_epoch=parts.train_loader.order.steps_per_epoch,
        epoch_size=parts.train_loader.order.epoch_size,
        rank_bytes=memory_by_part(parts, num_ranks=1),
        shards=1,
        on_host=False,
        checkpoint_bytes=estimate_checkpoint(parts, num_ranks=1),
    )


def test_weights_that_two_layers_share_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be " * 100)
    overrides = ["model=gpt", "model.width=16", "model.num_heads=2", "model.num_layers=1", "data=char_text", "data.path=text.txt"]
    config = checked(*overrides, "objective=language_modeling", base=[])
    assert measure(config).checkpoint_bytes == estimate_checkpoint(
        components(*overrides, "objective=language_modeling", base=[]), num_ranks=1
    )


def test_a_model_that_is_too_large_for_this_machine_is_measured() -> None:
    sizes = measure(checked("model.width=300000", "model.depth=3"))
    assert sizes.parameters > 10**11
    assert sum(asdict(sizes)["rank_bytes"].values()) > 16 * 10**11


@pytest.mark.parametrize(
    ("strategy", "of_ddp"), [("zero1", (1, 1, 1 / 4)), ("fsdp", (1 / 4, 1 / 4, 1 / 4)), ("fsdp+2", (1 / 2, 1 / 2, 1 / 2))]
)
def test_a_rank_keeps_its_share_of_what_the_strategy_cuts(strategy: str, of_ddp: tuple[float, ...]) -> None:
    """Of rows that four divides."""
    common = ["model.width=16", "optimizer=adamw", "data.num_classes=8", "cluster.processes_per_node=4", "callbacks=[ema]"]
    name, _, replicas = strategy.partition("+")
    own = measure(checked(*common, f"strategy={name}", *([f"strategy.replicas={replicas}"] if replicas else [])))
    ddp = measure(checked(*common, "strategy=ddp"))
    for part, share in zip(("parameters", "gradients", "optimizer", "callbacks"), [*of_ddp, of_ddp[0]], strict=True):
        assert own.rank_bytes[part] == pytest.approx(ddp.rank_bytes[part] * share, abs=100), part  # AdamW's counters are whole
    assert own.shards == round(1 / of_ddp[0])
    assert own.checkpoint_bytes == ddp.checkpoint_bytes


class Reads(nn.Module):
    """A model that looks at its values while it is made."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)
        if self.layer.weight.sum().item() > 0:
            self.layer.requires_grad_(False)


def test_a_model_that_reads_its_values_says_so() -> None:
    keys = ["model=mlp", "~model.image_shape", "~model.width", "~model.depth"]
    with pytest.raises(RuntimeError, match="meta"):
        measure(checked(*keys, "model._target_=tests.unit.training.build.test_dry_build.Reads", base=[]))


def test_weights_to_begin_with_that_do_not_fit_are_told_from_shapes_alone(tmp_path: Path) -> None:
    torch.save({"model_state_dict": components().model.state_dict()}, tmp_path / "fits.pt")
    torch.save({"epoch": 3, "model_state_dict": {"a.weight": torch.zeros(3)}}, tmp_path / "other.pt")
    assert measure(checked(f"init_from={tmp_path}/fits.pt"))
    with pytest.raises(ConfigError, match=r"init_from: .*other\.pt does not fit the model\n[\s\S]*extra          a\.weight"):
        measure(checked(f"init_from={tmp_path}/other.pt"))


class Sparse(nn.Module):
    def __init__(self, **given: object) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 4, sparse=True)


def test_sparse_gradients_are_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="tokens is an Embedding with sparse=True"):
        components(f"model._target_={__name__}.Sparse")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(1, 3).weight[:, 0].detach())
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2, bias=False)))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.body[0].requires_grad_(False)


def test_it_goes_as_deep_as_it_is_asked_to_with_shapes_counts_and_what_is_tied() -> None:
    assert layer_table(Tied(), depth=1) == [
        "layer      class       parameters  trained  shapes",
        "(itself)   Tied                56       36  scale [3]",
        "embedding  Embedding           20       20  weight [5, 4]",
        "body       Sequential          28        8",
        "head       Linear              25       25  weight = embedding.weight, bias [5]",
    ]
    assert layer_table(Tied(), depth=2)[4:7] == [
        "  0        Linear              20        0  weight [4, 4], bias [4]",
        "  1        ReLU",
        "  2        Sequential           8        8",
    ]
    assert len(layer_table(Tied(), depth=3)) == 9
