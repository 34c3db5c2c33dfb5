"""Rehearse steps before the first one: forward and backward of a micro-batch, after which nothing is changed but DDP's buckets."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ddp_train.distributed.world import World
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.training.parts.turns import without_gradients_for
from ddp_train.training.seeding import random_state, set_random_state
from ddp_train.traits import unadapted


def rebuild_buckets(components: Components, world: World, micro_batch: MicroBatch | None = None) -> None:
    """Bring DDP into the state that it has after its first steps, before a checkpoint is loaded. Collective.

    DDP rebuilds its buckets after the first backward, and where an element lies in a bucket decides the order in which the ranks'
    values are added. Without this, a resumed run on three or more ranks differs from one that never stopped in the last bits.
    Parameters are not touched; buffers and random streams are, so it comes before loading. Twice, because a static graph takes two.

    Where gradients are zeroed in place they are in the buckets from then on, so a run that begins rebuilds them, too. So it is
    with turns, of which one may come for the first time after a checkpoint.
    """
    if world.size > 1 and components.strategy.has_buckets:
        try_step(components, world, micro_batch, times=2)


def try_step(components: Components, world: World, micro_batch: MicroBatch | None = None, *, times: int = 1) -> None:
    """Take forward and backward of a micro-batch so many times, of each turn; forget the gradients. Collective."""
    micro_batch = micro_batch or components.train_loader.peek()
    with batch_on(world.device, micro_batch) as batch:
        for turn in times * components.turns.all:
            components.optimizer.zero_grad(set_to_none=True)  # old gradients would keep the first buckets alive
            with without_gradients_for(turn.others):
                with components.amp.autocast(world.device):
                    loss = components.loss(batch, turn)
                loss.total.backward()
    components.zero_gradients()


@contextmanager
def restoring_state(components: EvaluationComponents, device: torch.device) -> Iterator[None]:
    """Put back what computing changes: random streams, buffers, modes, and attributes of the model's modules and of the objective."""
    objective = unadapted(components.objective)
    parts = [components.model, objective, *getattr(objective, "__dict__", {}).values()]
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    copies = [buffer.detach().clone() for buffer in buffers]
    dicts = [vars(owner) for owner in [*modules, objective] if hasattr(owner, "__dict__")] + [module._buffers for module in modules]
    saved_dicts = [dict(attributes) for attributes in dicts]
    streams = random_state(device)
    yield  # an error ends the run, and a GPU that failed could not copy
    components.reshard()
    set_random_state(streams, device)
    for now, then in zip(dicts, saved_dicts, strict=True):
        now.clear()
        now.update(then)
    with torch.no_grad():
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)
