"""Evaluation where every forward is a collective: all ranks take as many, however many batches each has, and stop after the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ddp_train.distributed.world import World
from ddp_train.loader.reader import MicroBatch


def in_step(batches: Iterator[MicroBatch], world: World) -> Iterator[MicroBatch]:
    """Yield this rank's batches, and then its last one again, which does not count, until all ranks are through. Collective for each.

    Whether a rank has another batch only it knows, of a stream not before it has asked; so all tell each other before every batch.
    """
    newest = None
    while True:
        found = next(batches, None)
        if not _any(found is not None, world):
            return
        if found is None:
            assert newest is not None  # each rank has one at least
            found = newest._replace(counts=False, skipped=())
        newest = found
        yield found


def agreed(is_asked: Callable[[], bool], world: World) -> Callable[[], bool]:
    """Return what tells whether any rank was asked to stop; every rank calls it at the same places. Collective."""
    return lambda: _any(is_asked(), world)


def _any(value: bool, world: World) -> bool:
    return bool(world.sum(torch.tensor(int(value))).item())  # on the CPU: it waits for the other ranks, and not for the device
