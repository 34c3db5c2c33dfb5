"""`loader.micro_batch_size=auto`: the largest micro-batch that fits every rank's device, found before the first step by trying.

Samples of the run go through forward and backward of the bare model, in sizes that double and are then bisected. What a step has beside
that is held meanwhile: the optimizer's state, which its first step will make, and gradients that are there already. Nothing else remains:
weights are not touched, random streams and buffers are put back, and the data's position is not moved.

No rank waits for one that ran out: the bare model does not communicate, and after each try all agree. Where a forward is a collective
(fsdp, synchronised batch norm) no error can be taken back: what a size needs is foretold from smaller ones, and only what should fit is
tried.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.loader.device_copy import batch_on
from ddp_train.training.check.memory import is_out_of_memory, shown, still_to_come
from ddp_train.training.check.sanity_check import try_training, without_compiling
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turn import Turn

logger = logging.getLogger(__name__)

_MOST = 0.9  # of the memory that this process can have: the rest is for fragments, longer samples and evaluation


class DeviceMemory:
    """The memory of a GPU: how much this process can have, and how much it had at most."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def room(self) -> int:
        """Return how many bytes this process can have, with those that it has."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free) + torch.cuda.memory_reserved(self._device)

    def begin(self) -> None:
        """Give back what nobody uses, and measure anew."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def now(self) -> int:
        """Return how many bytes are in use."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the most bytes that this process had since then."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


def largest_micro_batch(components: Components, world: World, *, most: int) -> int:
    """Return the largest micro-batch that fits the devices of all ranks, the same number on each. Collective.

    At most it is what a rank has of the largest global batch (`most`). Raises RunError: not even a single sample fits. ConfigError: data,
    model and objective do not fit together.
    """
    sizes = sizes_of(most)
    try_training(components, components.train_loader.of_size(sizes[0]), world)
    with components.untouched(world.device), without_compiling():
        components.module.train()
        search = _Search(components, world, accumulates_below=most)
        found = bisect(sizes, search.fits)
        search.end()
    if found is None:
        happened = f"is auto, and a single sample does not fit the device of rank {search.short}"
        expected = f"a step of one sample, with the optimizer's state, in {_MOST:.0%} of the memory that is free"
        fix = "activation_checkpointing=full, amp=bf16, strategy=fsdp on more ranks, or a smaller model"
        raise RunError(key="loader.micro_batch_size", happened=happened, expected=expected, fix=fix)
    line = f"a micro-batch of {found} is the largest that fits: {shown(search.peaks[found])} of {shown(search.room)} at most"
    logger.info(line)
    world.print(f"batch    {line}")
    return found


def sizes_of(most: int) -> list[int]:
    """Return the micro-batches that differ: a share of a global batch is cut into parts of the same size, so others win nothing."""
    return sorted({-(-most // parts) for parts in range(1, most + 1)})


def bisect(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits, asking for sizes that double, then for those between; None: none does."""
    good, bad = -1, len(sizes)
    place = 0
    while good < place < bad:
        if not fits(sizes[place]):
            bad = place
            break
        good, place = place, min(bisect_left(sizes, 2 * sizes[place]), len(sizes) - 1)
    bad = bisect_left(sizes, True, good + 1, bad, key=lambda size: not fits(size))
    return sizes[bad - 1] if bad else None


class _Search:
    def __init__(self, components: Components, world: World, *, accumulates_below: int) -> None:
        self._components, self._world, self._most = components, world, accumulates_below
        parts = [components.model, components.objective]
        synchronised = any(isinstance(each, nn.SyncBatchNorm) for part in parts if isinstance(part, nn.Module) for each in part.modules())
        self._together = components.computes_together or (synchronised and world.size > 1)
        self._memory = DeviceMemory(world.device)
        self._memory.begin()
        self.room = self._memory.room()
        self.peaks: dict[int, int] = {}  # of the sizes that were tried, on this rank
        self._lasting = 0  # what the first of them took whatever its size: weights, gradients, the state to come
        self.short = -1  # the first rank that had too little of the size that was tried last
        lasting = still_to_come(components, num_ranks=world.size)
        if components.strategy.keeps_gradients(components.module):  # in memory of its own, in addition to that of the tries
            lasting -= sum(parameter.nbytes for parameter in components.trained.parameters() if parameter.requires_grad)
        self._held: Tensor | None = torch.empty(max(0, lasting), dtype=torch.uint8, device=world.device)

    def fits(self, size: int) -> bool:
        """Tell whether a size fits all ranks' devices. Collective."""
        limit = _MOST * self.room
        if not self._all(self._foretold(size) <= limit):
            return False
        peak = self._try(size)
        if peak is not None:
            self.peaks[size] = peak
        return self._all(peak is not None and peak <= limit)

    def end(self) -> None:
        """Give back what was held for the step to come."""
        self._held = None
        self._memory.begin()

    def _all(self, is_enough: bool) -> bool:
        """Tell whether something holds on all ranks; note the first where it does not. Collective."""
        world = self._world
        self.short = int(world.lowest(torch.tensor([world.size if is_enough else world.rank])))
        return self.short == world.size

    def _foretold(self, size: int) -> float:
        """Return how many bytes a size should take, from the two largest that were tried: memory grows in a line. 0: it can be tried.

        From one alone it is more than it will be, which counts where nothing else can be known.
        """
        known = [(0, self._lasting), *sorted(self.peaks.items())] if self._together else sorted(self.peaks.items())
        if len(known) < 2 or size <= known[-1][0]:  # between two, of which the larger was computed
            return 0.0
        (lower, least), (upper, most) = known[-2:]
        return most + (most - least) / (upper - lower) * (size - upper)

    def _try(self, size: int) -> int | None:
        """Return how many bytes a step of this size took at most; None: there were not so many, here."""
        self._memory.begin()
        try:
            self._compute(size)
            return self._memory.peak()
        except Exception as error:
            if self._together or not is_out_of_memory(error):
                raise
        finally:
            for parameter in self._components.trained.parameters():
                parameter.grad = None
            self._components.rest()
        return None  # only now the error is gone, and with it the tensors of its frames

    def _compute(self, size: int) -> None:
        """Take forward and backward as a step does: a second time where it accumulates, with the gradients of the first."""
        components, world = self._components, self._world
        objective: Any = components.objective  # bare: without what a strategy has put around the model to exchange gradients
        micro_batch = components.train_loader.of_size(size)
        batch, *_ahead = [batch_on(world.device, micro_batch) for _ in range(3)]  # as many as a run has on a GPU (`loader.device_copy`)
        turns: list[Turn | None] = [*components.turns.values()] or [None]
        for turn in turns:
            with turn.alone() if turn is not None else nullcontext():
                for _ in range(2 if size < self._most else 1):
                    with components.amp.autocast(world.device):
                        loss = objective.loss(components.model, batch, *([] if turn is None else [turn.name]))
                    loss.backward()
                    del loss
            self._lasting = self._lasting or self._memory.now()
            for parameter in components.trained.parameters():
                parameter.grad = None
