"""What is tried before the first step: it finds what does not fit, says it on one screen, and changes nothing."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.interfaces import Batch, Evaluated
from ddp_train.objective.classification import Classification
from ddp_train.objective.supervised import LossObjective
from ddp_train.training.check.sanity_check import try_first_batches
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turns import Turns, make_turns
from ddp_train.training.record import throughput
from ddp_train.training.record.records import Record
from tests.unit.parts import components, trainer
from tests.unit.training.ragged import ragged_components


def run(parts: Components, *, sanity_check: bool = True) -> list[Record]:
    """Train, and return the records without what depends on the clock."""
    records: list[Record] = []
    trainer(parts, write=records.append, sanity_check=sanity_check).train()
    clock = {"time", *throughput.NAMES}
    return [{name: value for name, value in record.items() if name not in clock} for record in records]


def refusal(parts: Components) -> str:
    """Return what is said instead of a first step."""
    parts.optimizer.step = lambda *_: pytest.fail("a step was taken")  # type: ignore[method-assign]
    with pytest.raises(UserError) as caught:
        run(parts)
    assert caught.value.exit_code == 2
    return str(caught.value)


def with_model(model: nn.Module, *overrides: str) -> Components:
    """Return a small run of another model."""
    parts = components("trainer.max_steps=3", *overrides)
    turns = Turns(partial(make_turns, model, parts.objective, parts.strategy, alone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return replace(parts, model=model, trained_module=model, turns=turns, optimizer=optimizer)


class Moody(nn.Sequential):
    """Dropout, averages, and numbers that each forward changes: a buffer that becomes another tensor, and an attribute."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(768, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 10))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)
        self.calls += 1
        logits: Tensor = super().forward(inputs)
        return logits * (1 + 1e-3 * self.seen + 1e-3 * self.calls)


def test_a_run_computes_the_same_with_and_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    def trained(sanity_check: bool) -> list[Any]:
        parts = with_model(Moody())
        torch.manual_seed(1)
        records = run(parts, sanity_check=sanity_check)
        return [*records, [value.tolist() for value in parts.model.state_dict().values()], torch.rand(()).item(), np.random.rand()]

    assert trained(True) == trained(False)
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("memory")]
    assert printed == [
        "tried    training batch (float32 [32, 3, 16, 16], int64 [32]) on cpu, the model gives float32 [32, 10], loss "
        + printed[0].split()[-1],
        "tried    evaluation batch (float32 [101, 3, 16, 16], int64 [101]) on cpu, the model gives float32 [101, 10]",
    ]


class Numbers(torch.utils.data.IterableDataset[Any]):
    """A stream that draws, and counts how often it was begun."""

    def __init__(self, split: str = "train") -> None:
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        for number in range(64):
            yield torch.rand(3, 16, 16) + self.begun, number % 10


def test_a_stream_goes_on_as_if_nothing_had_been_read() -> None:
    node = [
        "data._target_=tests.unit.training.check.test_sanity_check.Numbers",
        "~data.image_size",
        "~data.channels",
        "~data.num_classes",
        "~data.noise",
        "~data.seed",
    ]
    sizes = ["~data.num_samples", "~data.eval.num_samples", "trainer.max_steps=5", "evaluation.every_steps=2"]
    model = ["model.image_shape=[3,16,16]", "model.num_classes=10"]

    def trained(sanity_check: bool) -> list[Record]:
        base = ["model=mlp", "model.width=16", "~metrics.tensorboard"]
        return run(components(*node, *sizes, *model, base=base), sanity_check=sanity_check)

    assert trained(True) == trained(False)


class Outputs(nn.Module):
    """A model whose output is something else than a tensor."""

    def __init__(self, *, classes: int = 10, wraps: Any = lambda logits: logits, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.wraps = nn.Linear(768, classes, dtype=dtype), wraps

    def forward(self, inputs: Tensor) -> Any:
        return self.wraps(self.linear(inputs.flatten(1)))


MISMATCHES: dict[str, tuple[nn.Module, list[str]]] = {
    "another type": (
        Outputs(dtype=torch.float64),
        [
            "model: the first training batch fails: RuntimeError: mat1 and mat2 must have the same dtype",
            "Outputs (float64) takes float32 [32, 3,",
        ],
    ),
    "another shape": (
        nn.Sequential(nn.Flatten(), nn.Linear(7, 10)),
        ["model: the first", "mat1 and mat2 shapes cannot be multiplied", "data       gives (float32 [32, 3, 16, 16], int64 [32])"],
    ),
    "a dict": (
        Outputs(wraps=lambda logits: {"hidden": logits}),
        [
            "objective: the first",
            "TypeError: a model gives a tensor, a tuple that begins with it, or a dict with logits or out",
            "gives {hidden: float32 [32, 10]}",
        ],
    ),
    "no gradient": (Outputs(wraps=torch.detach), ["objective: the first", "loss does not depend on the parameters"]),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_what_does_not_fit_is_one_screen_with_keys_shapes_and_types(kind: str) -> None:
    model, expected = MISMATCHES[kind]
    said = refusal(with_model(model))
    for text in [*expected, "data   ", "model   ", "objective  Classification"]:
        assert text in said


def test_the_users_own_line_is_shown() -> None:
    assert "test_sanity.py:" in (said := refusal(with_model(Outputs(wraps=lambda logits: logits[:, 99])))) and "logits[:, 99]" in said


def test_samples_that_the_objective_does_not_understand_are_shown_with_the_way_out() -> None:
    parts = components()
    parts.train_loader.source.batch = lambda indices: {
        "image": torch.zeros(len(indices), 3),
        "mask": torch.zeros(1),
        "label": torch.zeros(1),
    }
    said = refusal(parts)
    assert said.startswith("model: the first training batch fails: TypeError: MLP.forward() got an unexpected keyword argument 'image'")
    assert "{image: float32 [32, 3], mask: float32 [1], label: float32 [1]}" in said
    assert "fix: loader.fields=[image,mask,label]" in said


class Wrong(Classification):
    """An objective that goes wrong in evaluation alone."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        measured = super().evaluate(model, batch)
        return measured._replace(values={**measured.values, "loss": torch.zeros(3, 2)})


def test_a_fault_of_the_evaluation_is_found_before_the_first_step() -> None:
    parts = components()
    said = refusal(replace(parts, objective=Wrong()))
    assert "the first evaluation batch fails" in said and "evaluate gives float32 [3, 2] as 'loss' for 101 samples" in said


def test_evaluation_data_that_cannot_be_read_is_found_before_the_first_step() -> None:
    parts = components()
    assert parts.eval_loader is not None
    parts.eval_loader.source.batch = lambda indices: 1 / 0  # type: ignore[attr-defined]
    parts.optimizer.step = lambda *_: pytest.fail("a step was taken")  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run(parts)


def test_a_label_out_of_range_anywhere_in_the_data_is_named_before_the_first_step() -> None:
    parts = with_model(Outputs())
    source: Any = parts.train_loader.source
    read, labels = source.batch, np.arange(640) % 10
    labels[17] = 12
    source.batch = lambda indices: (read(indices)[0], torch.from_numpy(labels[indices]))
    type_with_labels = type("Labelled", (type(source),), {"labels": labels})
    source.__class__ = type_with_labels
    assert "label 12 of sample 17 is out of range: the model's output has 10 classes (1 of 640 labels of the training data)" in refusal(
        parts
    )


@pytest.mark.parametrize("says_so", [True, False])
def test_labels_of_a_classifier_of_ones_own_are_looked_at_where_it_says_that_they_are_classes(says_so: bool) -> None:
    parts = with_model(Outputs())
    parts = replace(parts, objective=OwnClassifier(says_so))
    parts = replace(parts, turns=Turns(partial(make_turns, parts.model, parts.objective, parts.strategy, alone())))
    source: Any = parts.train_loader.source
    read = source.batch
    source.batch = lambda indices: (read(indices)[0], torch.full((len(indices),), 12))
    assert ("label 12 of sample" in refusal(parts)) is says_so


class OwnClassifier(LossObjective):
    """A classifier that is none of ours, and fails by itself where its labels were not checked."""

    def __init__(self, says_so: bool) -> None:
        super().__init__(lambda logits, labels: logits[torch.arange(len(labels)), labels].mean())
        self.labels_are_classes = says_so


@pytest.mark.parametrize("micro_batch_size", [7, 32])
def test_a_sum_is_refused_before_the_first_step(micro_batch_size: int) -> None:
    parts = with_model(Moody(), f"loader.micro_batch_size={micro_batch_size}")
    parts = replace(parts, objective=LossObjective(nn.CrossEntropyLoss(reduction="sum")))
    said = refusal(parts)
    assert "CrossEntropyLoss is the sum over the batch" in said and "fix: objective.reduction=mean" in said


def test_masked_tokens_are_trained_on_also_where_a_batch_has_none_that_count() -> None:
    for size in (1, 5):
        run(ragged_components("trainer.global_batch_size=5", f"loader.micro_batch_size={size}", "trainer.max_steps=1"))


def test_no_tensor_of_the_check_is_kept() -> None:
    parts, alive = components(), list[Any]()
    parts.model.register_forward_hook(lambda module, inputs, output: alive.append(weakref.ref(output)))
    try_first_batches(parts, next(parts.train_loader.micro_batches(0)), alone(), 0)
    assert len(alive) == 2 * (1 + 3 * 4)  # one batch of each split, and some samples of it, twice, and their halves
    assert [reference() for reference in alive] == [None] * len(alive)
