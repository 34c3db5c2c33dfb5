"""`loader.micro_batch_size=auto`: the largest micro-batch that fits every rank's device, found before the first step by trying.

Samples of the run go through forward and backward of the bare model, in sizes that double and are then bisected. Meanwhile memory is
reserved for the rest of a step: the optimizer's state, which its first step will make, and gradients. Nothing of this remains: weights are
not touched, random streams and buffers are put back, and the data's position is not moved.

No rank waits for one that ran out: the bare model does not communicate, and after each try all agree. Where a forward is a collective
(fsdp, synchronised batch norm) no error can be taken back. There the memory of a size is predicted from smaller ones, and a size is tried
only if it should fit.
"""

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.interfaces.objective import loss_sum, module_of
from ddp_train.loader.device_copy import batch_on, to_device
from ddp_train.training.check.memory import format_bytes, is_out_of_memory, memory_to_come
from ddp_train.training.check.rehearsal import restoring_state
from ddp_train.training.check.sanity_check import try_training, without_compiling
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turns import without_gradients_for

logger = logging.getLogger(__name__)

_MAX_SHARE = 0.9  # of the memory that this process can have: the rest is for fragments, longer samples and evaluation


class DeviceMemory:
    """The memory of a GPU: how much of it this process can have, has and had at most, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Return the memory for this process in bytes: the free part, and what the process has already."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free) + torch.cuda.memory_reserved(self._device)

    def begin(self) -> None:
        """Free unused blocks, and measure the peak anew."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the most that this process had since `begin`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


def largest_micro_batch(components: Components, world: World, *, most: int) -> int:
    """Return the largest micro-batch that fits the devices of all ranks, the same number on each. Collective.

    It is at most `most`, a rank's part of the largest global batch. Raises RunError: not even a single sample fits. ConfigError: data,
    model and objective do not fit together.
    """
    sizes = sizes_to_try(most)
    try_training(components, components.train_loader.of_size(sizes[0]), world)
    with restoring_state(components, world.device), without_compiling():
        components.trained_module.train()
        search = _Search(components, world, accumulates_below=most)
        largest = bisect(sizes, search.fits)
        search.end()
    if largest is None:
        happened = f"is auto, and a single sample does not fit the device of rank {search.short_rank}"
        expected = f"a step of one sample, with the optimizer's state, in {_MAX_SHARE:.0%} of the memory that is free"
        fix = "activation_checkpointing=full, amp=bf16, strategy=fsdp on more ranks, or a smaller model"
        raise RunError(key="loader.micro_batch_size", happened=happened, expected=expected, fix=fix)
    peak, total = format_bytes(search.peaks[largest]), format_bytes(search.total)
    line = f"a micro-batch of {largest} is the largest that fits: {peak} of {total} at most"
    logger.info(line)
    world.print(f"batch    {line}")
    return largest


def sizes_to_try(most: int) -> list[int]:
    """Return the sizes worth a try: accumulation cuts `most` samples into equal parts, so that a size between two of them wins nothing."""
    return sorted({-(-most // parts) for parts in range(1, most + 1)})


def bisect(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits: try sizes that double, then those between. None: none fits."""
    good, tried, bad = -1, 0, len(sizes)
    while good < tried < bad:
        if not fits(sizes[tried]):
            bad = tried
            break
        good, tried = tried, min(bisect_left(sizes, 2 * sizes[tried]), len(sizes) - 1)
    bad = bisect_left(sizes, True, good + 1, bad, key=lambda size: not fits(size))
    return sizes[bad - 1] if bad else None


class _Search:
    def __init__(self, components: Components, world: World, *, accumulates_below: int) -> None:
        self._components, self._world, self._most = components, world, accumulates_below
        roots = [root for root in (components.model, module_of(components.objective)) if root is not None]
        synchronised = any(isinstance(module, nn.SyncBatchNorm) for root in roots for module in root.modules())
        self._forward_is_collective = components.forward_is_collective or (synchronised and world.size > 1)
        self._memory = DeviceMemory(world.device)
        self._memory.begin()
        self.total = self._memory.total()
        self.peaks: dict[int, int] = {}  # of the sizes that were tried, on this rank
        self._constant = 0  # what the first try took whatever its size: weights, gradients, the state to come
        self.short_rank = -1  # the first rank with too little memory for the size that was tried last
        to_come = memory_to_come(components, num_ranks=world.size)
        if not components.turns.by_name and components.strategy.zeroes_gradients_in_place(components.turns.plain.wrapped):
            # In addition to the memory of the tries.
            to_come -= sum(parameter.nbytes for parameter in components.trained_module.parameters() if parameter.requires_grad)
        self._reserved: Tensor | None = torch.empty(max(0, to_come), dtype=torch.uint8, device=world.device)

    def fits(self, size: int) -> bool:
        """Tell whether a size fits all ranks' devices. Collective."""
        limit = _MAX_SHARE * self.total
        if not self._on_all_ranks(self._predict(size) <= limit):
            return False
        peak = self._try(size)
        if peak is not None:
            self.peaks[size] = peak
        return self._on_all_ranks(peak is not None and peak <= limit)

    def end(self) -> None:
        """Free what was reserved for the step to come."""
        self._reserved = None
        self._memory.begin()

    def _on_all_ranks(self, is_enough: bool) -> bool:
        """Tell whether memory is enough on all ranks; note the first where it is not. Collective."""
        world = self._world
        self.short_rank = int(world.lowest(torch.tensor([world.size if is_enough else world.rank])))
        return self.short_rank == world.size

    def _predict(self, size: int) -> float:
        """Return how many bytes a size should take, from the two largest that were tried: memory grows linearly. 0: it can be tried.

        Where a forward is a collective, one try is enough: together with the constant part it predicts too much rather than too little.
        """
        known = [(0, self._constant), *sorted(self.peaks.items())] if self._forward_is_collective else sorted(self.peaks.items())
        if len(known) < 2 or size <= known[-1][0]:  # a larger one was computed
            return 0.0
        (lower, least), (upper, most) = known[-2:]
        return most + (most - least) / (upper - lower) * (size - upper)

    def _try(self, size: int) -> int | None:
        """Return the most bytes that a step of this size took; None: this rank ran out of memory."""
        self._memory.begin()
        try:
            self._compute(size)
            return self._memory.peak()
        except Exception as error:
            if self._forward_is_collective or not is_out_of_memory(error):
                raise
        finally:
            for parameter in self._components.trained_module.parameters():
                parameter.grad = None
            self._components.reshard()
        return None  # only now the error is gone, and with it the tensors of its frames

    def _compute(self, size: int) -> None:
        """Run forward and backward as a step does; where it accumulates, a second time on top of the first one's gradients."""
        components, world = self._components, self._world
        micro_batch = components.train_loader.of_size(size)
        _ahead = [to_device(micro_batch.batch, world.device) for _ in range(2)]  # as many as a run has on a GPU (`loader.device_copy`)
        with batch_on(world.device, micro_batch) as batch:
            for turn in components.turns.all:
                with without_gradients_for(turn.others):
                    for _ in range(2 if size < self._most else 1):
                        with components.amp.autocast(world.device):
                            # Of the bare model, which exchanges no gradients.
                            loss = loss_sum(components.objective, components.model, batch, turn.name).total
                        loss.backward()
                        del loss
                self._constant = self._constant or self._memory.in_use()
                for parameter in components.trained_module.parameters():
                    parameter.grad = None
