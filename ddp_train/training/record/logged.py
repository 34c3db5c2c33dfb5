"""The values that callbacks and the model log between two records: sums that stay on the device until the log step reads them.

A mean is that of the finite values, counted on the device, too: a step that `health.on_nonfinite=skip` leaves out spoils no record.

Ranks need not log the same names. The reduction of each log step also counts the names that are new on a rank. Only where there are new
names, the ranks gather them, and reduce their sums once by themselves.
"""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.model_log import AXES, Sink
from ddp_train.training.record import throughput
from ddp_train.training.train_state import EarlyEnd, TrainState, WindowSums

_RESERVED = ("loss", "lr", "grad_norm", "skipped_samples", "skipped_steps", *throughput.NAMES)


class LoggedSum(NamedTuple):
    """What one rank has logged under one name."""

    total: float | Tensor = 0.0  # of the finite values
    num_finite: float | Tensor = 0.0
    calls: float = 0


class ReductionGroup:
    """Some numbers of a reduction, returned by `add`, and their sums after it."""

    sums: list[float]  # over all ranks; set by `Reduction.sum`


class Reduction:
    """Groups of this rank's numbers, to be summed together. Every rank adds the same groups in the same order, as long as its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._numbers: list[tuple[ReductionGroup, list[float]]] = []
        self._tensors: list[tuple[ReductionGroup, list[Tensor]]] = []

    def add(self, numbers: Iterable[float]) -> ReductionGroup:
        """Add a group of the host's numbers, which go to the device together."""
        self._numbers.append((group := ReductionGroup(), [*numbers]))
        return group

    def add_tensors(self, tensors: Iterable[float | Tensor]) -> ReductionGroup:
        """Add a group of numbers that are on the device; others among them are sent there, one by one."""
        sent = (torch.as_tensor(tensor, dtype=torch.float64).to(self.world.device, non_blocking=True) for tensor in tensors)
        self._tensors.append((group := ReductionGroup(), [tensor.flatten() for tensor in sent]))
        return group

    def sum(self) -> None:
        """Give each group its sums over all ranks: one reduction, one read of the device. Collective."""
        numbers = torch.tensor([number for _, numbers in self._numbers for number in numbers], dtype=torch.float64)
        sent = numbers.to(self.world.device, non_blocking=True)
        sums = iter(self.world.sum(torch.cat([sent, *(tensor for _, tensors in self._tensors for tensor in tensors)])).tolist())
        for group, numbers_of_group in self._numbers:
            group.sums = [*islice(sums, len(numbers_of_group))]
        for group, tensors in self._tensors:
            group.sums = [*islice(sums, sum(map(len, tensors)))]


class LoggedGroups(NamedTuple):
    """What one reduction sums of `Logged`, on all ranks."""

    num_new_names: ReductionGroup
    num_end_requests: ReductionGroup
    of_names: dict[str, tuple[ReductionGroup, ReductionGroup]]  # the total with its count, and the calls


class Logged:
    """The sums of one rank. `state` gets the names that all ranks know, and the early end they agree on; `turns` reserve a loss each."""

    def __init__(self, state: TrainState, turns: Collection[str] = ()) -> None:
        self._state = state
        self._reserved = (*_RESERVED, *map(loss_of, turns))
        self._sums: dict[str, LoggedSum] = {}  # by name
        self.end_request: EarlyEnd | None = None  # of a callback on this rank

    def add(self, name: str, value: float | Tensor) -> None:
        """Count one value. On the hot path: nothing is read from the device."""
        require_loggable(name, value, reserved=self._reserved)
        number: float | Tensor
        is_finite: float | Tensor
        if isinstance(value, Tensor):
            number = value.detach().reshape(()).to(torch.float64)
            is_finite = torch.isfinite(number)
            number = torch.where(is_finite, number, 0.0)
        else:
            is_finite = float(math.isfinite(value))
            number = float(value) if is_finite else 0.0
        total, num_finite, calls = self._sums.get(name, LoggedSum())
        self._sums[name] = LoggedSum(total + number, num_finite + is_finite, calls + 1)

    def sink(self) -> Sink:
        """Return `add` for compiled code, which calls it and does not trace it: else each count would be compiled anew."""
        add: Sink = torch.compiler.disable(self.add) if "torch._dynamo" in sys.modules else self.add  # its import takes a second
        return add

    def add_to(self, reduction: Reduction) -> LoggedGroups:
        """Add the numbers whose sums `reduce_and_reset` needs."""
        num_new_names = reduction.add([len(self._new_names())])
        num_end_requests = reduction.add([self.end_request is not None])
        return LoggedGroups(num_new_names, num_end_requests, self._add_sums(reduction, self._state.logged_names))

    def _add_sums(self, reduction: Reduction, names: Sequence[str]) -> dict[str, tuple[ReductionGroup, ReductionGroup]]:
        groups = {}
        for name in names:
            total, num_finite, calls = self._sums.get(name, LoggedSum())
            groups[name] = reduction.add_tensors([total, num_finite]), reduction.add([float(calls)])
        return groups

    def reduce_and_reset(self, world: World, reduced: LoggedGroups) -> dict[str, float]:
        """Return the means, after the reduction of `add_to`; note an early end that is requested; begin anew. Collective."""
        groups = reduced.of_names
        if any(reduced.num_new_names.sums):
            reduction = Reduction(world)
            groups |= self._add_sums(reduction, sorted(set(chain.from_iterable(world.gather(self._new_names())))))
            reduction.sum()
            self._state.logged_names = [*groups]
        if any(reduced.num_end_requests.sums):
            self.agree(world)
        self._sums = {}
        sums = {name: total_and_count.sums for name, (total_and_count, calls) in groups.items() if any(calls.sums)}
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}

    def agree(self, world: World) -> None:
        """End the run if a callback of any rank has requested it: the first rank's reason counts. Collective."""
        request = next((request for request in world.gather(self.end_request) if request is not None), None)
        self._state.early_end, self.end_request = self._state.early_end or request, None

    def restart(self, sums: WindowSums | None) -> None:
        """Begin with the sums of a checkpoint."""
        self._sums = {name: LoggedSum(*values) for name, values in sums.logged.items()} if sums else {}
        self.end_request = EarlyEnd(**sums.end_request) if sums and sums.end_request else None

    def state(self) -> dict[str, Any]:
        """Return the values for a checkpoint. Reads the device."""
        logged = {name: [float(number) for number in values] for name, values in self._sums.items()}
        return {"logged": logged, "end_request": vars(self.end_request) if self.end_request else None}

    def _new_names(self) -> list[str]:
        return [name for name in self._sums if name not in self._state.logged_names]


def loss_of(turn: str) -> str:
    return f"loss_{turn}"


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def require_loggable(name: str, value: float | Tensor, *, reserved: Sequence[str]) -> None:
    """Raise a ValueError for a reserved name, or a value that is not one number."""
    if name in reserved or name in AXES:
        raise ValueError(f"log({name!r}, ...): the record has a {name!r} already; another name, as my/{name}")
    if value.numel() != 1 if isinstance(value, Tensor) else not isinstance(value, Real):
        described = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"log({name!r}, ...) takes one number, and got {described}")
