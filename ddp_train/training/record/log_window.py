"""The steps since the last log step: one loss per step, on the device until they are read."""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_train.training.record.logged import Logged, Reduction, ReductionGroup, loss_of
from ddp_train.training.train_state import WindowSums

_INITIAL_STEPS = 64  # capacity; it doubles when it is full


def is_host(device: torch.device) -> bool:
    """Tell whether numbers on a device can be read without waiting for it."""
    return device.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The numbers of a window, read from the device."""

    totals: list[float]  # the loss of each step over all ranks, not divided by anything
    num_units: list[float]  # of each step's global batch: samples or tokens, by which its loss is divided
    norms: list[float]  # gradient norms of the steps not judged yet, root mean square over the ranks; [] where no step depends on its norm
    grad_norm: float | None = None  # of the newest step
    turn_totals: dict[str, list[float]] = field(default_factory=dict)  # of each turn: its part of `totals`
    skipped_samples: int = 0
    data_wait_s: float = 0.0  # of the rank that waited for its data the longest


class LogWindow:
    """The steps since the last log step.

    Args:
        turns: the names of the objective's turns.
        units_are_per_rank: the tensors that `end_step` gets count this rank's part of the batch alone, and not all of it.
    """

    def __init__(self, device: torch.device, *, turns: Collection[str] = (), units_are_per_rank: bool = False) -> None:
        self._device = device
        self._turns = turns
        self._units_are_per_rank = units_are_per_rank
        self.restart(None)

    def restart(self, sums: WindowSums | None) -> None:
        """Begin with the sums of a checkpoint between two log steps, so that the next record is that of a run that never stopped."""
        saved = sums or WindowSums()
        self._losses = _LossColumn(saved.losses, self._device)
        zeros = [0.0] * len(saved.losses)
        self._turn_losses = {name: _LossColumn(saved.turn_losses.get(name, zeros), self._device) for name in self._turns}
        self._columns = [self._losses, *self._turn_losses.values()]
        self._turns_of_steps = [list(names) for names in saved.turns_of_steps]
        self._num_units: list[float | Tensor] = list(saved.num_units)
        self._skipped_samples = saved.skipped_samples  # on this rank
        self.skipped_steps = saved.skipped_steps
        self._norms: list[Tensor] = []  # gradient norms of the steps not judged yet; only where a step depends on its norm
        self.num_judged = len(saved.num_units)  # steps that `LossMonitor` has judged; all steps of a checkpoint are
        self._start()

    def _start(self) -> None:
        self.steps = self.samples = 0  # since this process began the window, for the time of a step
        self._data_wait_s = 0.0
        self.started = time.perf_counter()  # and later by as much as is `excluded`

    def reset(self) -> None:
        """Forget the steps that have been recorded. Their tensors are used again."""
        for column in self._columns:
            column.values.zero_()
        self._turns_of_steps, self._num_units, self._norms = [], [], []
        self._skipped_samples = self.skipped_steps = self.num_judged = 0
        self._start()

    def begin_step(self) -> None:
        """Let `add` count for the next step."""
        for column in self._columns:
            column.begin(len(self._num_units))

    def add(self, loss: Tensor, times: int = 1, *, turn: str | None = None) -> None:
        """Add a loss, shape [], so many times: the sum over some of this rank's units, to the present step's and the turn's part of it."""
        self._losses.add(loss, times)
        if turn is not None:
            self._turn_losses[turn].add(loss, times)

    def begin_turns(self, turns: Iterable[str]) -> None:
        """Note the turns of the present step, of an objective that takes turns."""
        self._turns_of_steps.append([*turns])

    def add_data(self, *, wait_s: float, num_skipped: int) -> None:
        """Count what the micro-batches of a step took: seconds of waiting, and the samples of this rank that were skipped."""
        self._data_wait_s += wait_s
        self._skipped_samples += num_skipped

    def end_step(self, num_units: float | Tensor, *, samples: int, norm: Tensor | None = None) -> None:
        """Count a step: its samples, the units that its loss is divided by, and its norm if the guard needs it."""
        if norm is not None:
            self._norms.append(norm)
        self._num_units.append(num_units)
        self.steps += 1
        self.samples += samples

    def read(self, reduction: Reduction, grad_norm: Tensor | None = None) -> Reading:
        """Sum this rank's numbers with those of the others, together with what `reduction` has already. Reads the device once. Collective.

        `grad_norm`: of the newest step; None: not known.
        """
        world = reduction.world
        num_steps = len(self._num_units)
        skipped = reduction.add([self._skipped_samples])
        waits = reduction.add(self._data_wait_s if rank == world.rank else 0.0 for rank in range(world.size))
        losses = reduction.add_tensors([self._losses.values[:num_steps]])
        turn_losses = {turn: reduction.add_tensors([column.values[:num_steps]]) for turn, column in self._turn_losses.items()}
        on_device = [number for number in self._num_units if isinstance(number, Tensor)]
        stacked = [torch.stack(on_device)] if on_device else []
        is_counted = self._units_are_per_rank or world.is_main  # else all ranks have the same numbers: rank 0's count
        units_on_device = reduction.add_tensors(stacked if is_counted else map(torch.zeros_like, stacked))
        squares = reduction.add_tensors([torch.stack(self._norms).double().square()] if self._norms else [])
        newest_square = reduction.add_tensors([] if grad_norm is None else [grad_norm.double().square()])
        reduction.sum()

        def over_ranks(squares: ReductionGroup) -> list[float]:
            return [math.sqrt(square / world.size) for square in squares.sums]  # root mean squares: of equal norms, the norm

        of_tensors = iter(units_on_device.sums)
        return Reading(
            totals=losses.sums,
            num_units=[next(of_tensors) if isinstance(number, Tensor) else float(number) for number in self._num_units],
            norms=over_ranks(squares),
            grad_norm=next(iter(over_ranks(newest_square)), None),
            turn_totals={turn: group.sums for turn, group in turn_losses.items()},
            skipped_samples=int(skipped.sums[0]),
            data_wait_s=max(waits.sums),
        )

    def turns_of(self, index: int) -> str:
        """Return the names of a step's turns; "" where the objective takes none."""
        return ", ".join(self._turns_of_steps[index]) if self._turns_of_steps else ""

    def turn_means(self, reading: Reading) -> dict[str, float]:
        """Return the mean loss of each turn, as `loss_<turn>`, over the counted steps that took it. Other turns are left out."""
        means = {}
        for turn in self._turn_losses:
            totals = reading.turn_totals[turn]
            steps = [index for index, turns in enumerate(self._turns_of_steps) if turn in turns and self._num_units[index]]
            if steps:
                means[loss_of(turn)] = sum(totals[index] for index in steps) / sum(float(self._num_units[index]) for index in steps)
        return means

    def mark_judged(self, num_units: Sequence[float], *, skipped: Sequence[int]) -> None:
        """Note that all steps are judged, with the units of each; set loss and units of the skipped ones to 0: they were not taken."""
        self._num_units = [*num_units]
        for index in skipped:
            for column in self._columns:
                column.values[index] = 0.0
            self._num_units[index] = 0.0
        self.skipped_steps += len(skipped)
        self.num_judged, self._norms = len(self._num_units), []

    def to_saved(self, logged: Logged | None = None) -> WindowSums:
        """Return the sums for a checkpoint, read from the device. All steps must be judged."""
        assert self.num_judged == len(self._num_units)
        losses, *of_turns = (column.values[: len(self._num_units)].tolist() for column in self._columns)
        return WindowSums(
            losses,
            [float(number) for number in self._num_units],
            self._skipped_samples,
            self.skipped_steps,
            turn_losses=dict(zip(self._turn_losses, of_turns, strict=True)),
            turns_of_steps=[list(names) for names in self._turns_of_steps],
            **(logged.state() if logged else {}),
        )

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Take the time within (an evaluation, a save) out of the time per step."""
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started


class _LossColumn:
    """A sum for each step of a window, float64; the first ones begin with `values`."""

    def __init__(self, values: Sequence[float], device: torch.device) -> None:
        self.values = torch.zeros(len(values) + _INITIAL_STEPS, dtype=torch.float64, device=device)
        self.values[: len(values)] = torch.tensor(values, dtype=torch.float64)
        self._index = 0
        self._view()

    def _view(self) -> None:
        """View each number: on the CPU through numpy, in a tenth of the time that torch takes to add to a tensor."""
        self._on_host = is_host(self.values.device)
        self._views: Any = self.values.numpy() if self._on_host else self.values.unbind()  # once: a view takes as long as an addition

    def begin(self, index: int) -> None:
        """Let `add` count for a step, the one after the last at most."""
        if index == len(self.values):
            self.values = torch.cat([self.values, torch.zeros_like(self.values)])
            self._view()
        self._index = index

    def add(self, number: Tensor, times: int) -> None:
        if self._on_host:
            self._views[self._index] += number.item() * times
        else:
            self._views[self._index].add_(number.detach(), alpha=times)
