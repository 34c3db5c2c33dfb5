"""What FSDP cuts, and what it refuses. Runs of it: tests/distributed/test_strategies.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.interfaces import LossModule
from ddp_train.model.gpt import GPT
from ddp_train.strategy.fsdp import FSDP, _require_shardable
from tests.unit.parts import checked
from tests.unit.sharded_tensors import rank_of


def names(model: nn.Module, **options: Any) -> list[str]:
    found = set(FSDP(**options)._find_blocks(model))
    return [name for name, module in model.named_modules() if module in found]


def gpt() -> GPT:
    return GPT(vocab_size=11, context_length=8, num_layers=2, num_heads=2, width=4)


def test_blocks_are_what_lies_side_by_side_or_what_is_named() -> None:
    assert names(gpt()) == ["blocks.0", "blocks.1"]
    assert names(gpt(), blocks=["Block", "FeedForward"]) == ["blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == ["0", "3"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    stages = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]  # a ModuleList has no forward


def test_a_block_whose_weights_another_one_has_too_is_not_cut_by_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert names(model) == ["1"]


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no module of a class Blok") as raised:
        names(gpt(), blocks=["Blok"])
    assert "Block" in str(raised.value.expected)


def test_blocks_are_auto_or_a_list() -> None:
    with pytest.raises(ConfigError) as raised:
        FSDP(blocks="Block")
    assert raised.value.key == "strategy.blocks"
    with pytest.raises(ConfigErrors, match=r"strategy\.param_dtype: is 'half'"):
        checked("strategy=fsdp", "strategy.param_dtype=half")


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


def test_what_cannot_be_cut_is_refused_before_anything_is() -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Warm has parameters to train"):
        FSDP().prepare(LossModule(model, Warm()), torch.device("cpu"), 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="take turns"):
        FSDP().prepare(LossModule(model, Warm(), turn="critic"), torch.device("cpu"), 2)  # type: ignore[arg-type]
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match="scale has no dimension"):
        _require_shardable(model)
    images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match="channels_last"):
        _require_shardable(images)


def test_groups_of_replicas_wait_as_long_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # without it the group would wait for the others
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=4, timeout=timedelta(seconds=77))
    try:
        mesh = FSDP(replicas=2)._mesh(torch.device("cpu"), 4)
        limits = [mesh.get_group(name)._get_backend(torch.device("cpu")).options._timeout for name in ("replicas", "shards")]
    finally:
        dist.destroy_process_group()
    assert limits == [timedelta(seconds=77)] * 2


def test_buffers_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with rank_of(1, 2):
        model = FSDP().prepare(model, torch.device("cpu"), 2)
        monkeypatch.setattr(dist, "broadcast", lambda values, src: (sent.append(values.clone()), values.fill_(7)))
        FSDP()._copy_buffers_from_main(model, ())
    assert sorted((str(each.dtype), len(each)) for each in sent) == [("torch.float32", 8), ("torch.int64", 2)]
    assert all((buffer == 7).all() for buffer in model.buffers())


def test_one_rank_alone_trains_the_plain_model() -> None:
    model = nn.Linear(2, 2)
    assert FSDP().prepare(model, torch.device("cpu"), 1) is model
    assert type(model) is nn.Linear


def test_classes_keep_the_names_that_people_call_them_by() -> None:
    with rank_of(0, 2):
        model = FSDP().prepare(gpt(), torch.device("cpu"), 2)
    assert (type(model).__name__, type(model).__module__) == ("GPT", GPT.__module__)
    assert [type(each).__name__ for each in model.children() if isinstance(each, nn.ModuleList)] == ["ModuleList"]
    assert "FSDP" not in repr(model)
    assert isinstance(model, FSDPModule)


@pytest.mark.parametrize(("ahead", "in_forward", "in_backward"), [(None, [], [2]), (1, [1], [2]), (2, [1, 2], [1, 2])])
def test_the_weights_of_the_next_blocks_are_asked_for_ahead(ahead: int | None, in_forward: list[int], in_backward: list[int]) -> None:
    """In the forward of the first of four blocks, and when the backward of the third one begins."""
    seen: dict[str, list[int]] = {}

    def asked_for(when: str) -> None:
        if when not in seen:
            groups = [block._get_fsdp_state()._fsdp_param_group for block in blocks]
            seen[when] = [place for place, group in enumerate(groups) if group._all_gather_result is not None]

    class Tells(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = super().forward(inputs)
            asked_for(f"forward {blocks.index(self)}")
            outputs.register_hook(lambda gradient: asked_for(f"backward {blocks.index(self)}"))
            return outputs

    with rank_of(0, 2):
        model = FSDP(prefetch=ahead).prepare(nn.Sequential(*(Tells(4, 4) for _ in range(4))), torch.device("cpu"), 2)
        blocks: list[Any] = list(model.children())
        model(torch.ones(1, 4)).sum().backward()
    assert seen["forward 0"] == in_forward
    assert seen["backward 2"] == in_backward


def test_to_ask_ahead_needs_blocks() -> None:
    with rank_of(0, 2), pytest.raises(ConfigError, match="the weights of only 0 blocks"):
        FSDP(prefetch=1).prepare(nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"), 2)


def test_shards_lie_in_the_hosts_memory_where_they_are_to() -> None:
    """Pinned for a GPU alone; on a CPU they do anyway, and a config that asks for it is refused."""
    for offloads in (False, True):
        with rank_of(0, 2):
            model: Any = FSDP(cpu_offload=offloads).prepare(gpt(), torch.device("cpu"), 2)
        policies = {type(module._get_fsdp_state()._fsdp_param_group.offload_policy) for module in (model, *model.blocks)}
        assert policies == {CPUOffloadPolicy if offloads else OffloadPolicy}
    kept = [FSDP(cpu_offload=True).rank_memory(nn.Linear(1, 1), world_size).on_host for world_size in (1, 4)]
    assert kept == [False, True]
