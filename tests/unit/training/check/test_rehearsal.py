"""With accumulation, gradients stay in DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.training.parts.turns import Turn, Turns, as_loss_module
from ddp_train.training.record.records import Record
from tests.unit.parts import components, trainer


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Open a process group that has this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "is_kept"), [({}, True), ({"find_unused_parameters": True}, False), ({"gradient_as_bucket_view": False}, False)]
)
def test_with_accumulation_gradients_are_in_the_buckets_from_the_first_forward_on(
    group_of_one: None, settings: dict[str, bool], is_kept: bool
) -> None:
    """The one of two ranks: what a forward finds from the micro-batch before it."""
    parts = components("loader.micro_batch_size=8", "trainer.grad_accum_steps=4", "trainer.max_steps=3", "evaluation.every_steps=9")
    parts = replace(parts, eval_loaders={})
    ddp = nn.parallel.DistributedDataParallel(
        as_loss_module(parts.model, parts.objective), **({"gradient_as_bucket_view": True} | settings)
    )
    parts = replace(parts, turns=Turns(lambda: [Turn(wrapped=ddp)]))
    found: list[tuple[int, bool]] = []

    def look(*_: object) -> None:
        gradients = [parameter.grad for parameter in parts.model.parameters()]
        places = {gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}
        found.append((len(places), None in gradients))

    world = World(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
    parts.model.register_forward_pre_hook(look)
    trainer(parts, world=world).train()
    steps = found[-12:]
    if is_kept:
        assert len(found) == 2 + 12  # once more than the steps need, to move the gradients into the buckets that stay
        assert set(steps) == {(1, False)}  # all of them in one bucket
    else:
        assert len(found) == 12
        assert steps[0] == steps[4] == (0, True)  # a parameter that is not used has none
        assert steps[1][0] > 1


def test_that_gradients_stay_in_place_changes_no_step(group_of_one: None) -> None:
    def losses(**settings: bool) -> list[float]:
        parts, records = components("loader.micro_batch_size=8", "trainer.grad_accum_steps=4", "trainer.max_steps=3"), list[Record]()
        loss_module = as_loss_module(parts.model, parts.objective)
        ddp = nn.parallel.DistributedDataParallel(loss_module, gradient_as_bucket_view=True, **settings)
        parts = replace(parts, turns=Turns(lambda: [Turn(wrapped=ddp)]))
        torch.manual_seed(0)
        world = World(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
        trainer(parts, world=world, write=records.append).train()
        return [record["loss"] for record in records]

    assert losses() == losses(find_unused_parameters=True)
