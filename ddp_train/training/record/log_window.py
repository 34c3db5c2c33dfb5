"""What happened since the last log step: one loss per step, on the device until somebody reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.training.record.logged import Logged, loss_of
from ddp_train.training.train_state import WindowSums

_INITIAL_STEPS = 64  # room for so many; it doubles when it is full


def is_host(device: torch.device) -> bool:
    """Tell whether numbers on a device can be read without waiting for it."""
    return device.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the host knows of a window once it has read the device."""

    totals: list[float]  # the loss of each step over all ranks, not divided by anything
    weights: list[float]  # of each step's global batch
    norms: list[float]  # of the gradient, over the ranks their root mean square; of the steps not looked at yet, where a step depends on it
    grad_norm: float | None = None  # of the newest step
    skipped: int = 0  # samples, over all ranks
    turns: dict[str, list[float]] = field(default_factory=dict)  # by turn: its part of `totals`
    extra_sums: list[float] = field(default_factory=list)  # over all ranks, of the numbers that `read` was given
    logged: list[float] = field(default_factory=list)  # over all ranks, as `Logged` has given them; only for a record


class LogWindow:
    """The steps since the last log step.

    Args:
        device: where the losses are kept.
        sums: what a checkpoint between two log steps held, so that the next record is that of a run that never stopped.
        turns: the names of those that an objective has.
        own_weights: the tensors that `end_step` gets are of this rank's part of the batch alone, and not of all of it.
    """

    def __init__(
        self, device: torch.device, sums: WindowSums | None = None, *, turns: Collection[str] = (), own_weights: bool = False
    ) -> None:
        sums = sums or WindowSums()
        self._own_weights = own_weights
        self._losses = _Room(sums.losses, device)
        self._of_turns = {name: _Room(sums.turns.get(name, [0.0] * len(sums.losses)), device) for name in turns}
        self._rooms = [self._losses, *self._of_turns.values()]
        self._taken = [list(names) for names in sums.taken]  # the turns of each step
        self._weights: list[float | Tensor] = list(sums.weights)
        self.skipped = sums.skipped  # samples on this rank
        self.skipped_steps = sums.skipped_steps
        self.norms: list[Tensor] = []  # of the gradient, of the steps not looked at yet; only where a step depends on it
        self.num_judged = len(sums.weights)  # steps that have been looked at; all that a checkpoint holds have been
        self._start()

    def _start(self) -> None:
        self.steps = self.samples = 0  # since this process began the window, for the time of a step
        self.data_wait_s = 0.0
        self.started = time.perf_counter()

    def begin_again(self) -> None:
        """Forget the steps, of which a record tells now. What they have been kept in is used again."""
        for room in self._rooms:
            room.values.zero_()
        self._taken, self._weights, self.norms = [], [], []
        self.skipped = self.skipped_steps = self.num_judged = 0
        self._start()

    def begin_step(self) -> None:
        """Let `add` count for the next step."""
        place = len(self._weights)
        for room in self._rooms:
            room.begin(place)

    def add(self, loss: Tensor, *, turn: str | None = None) -> None:
        """Add a loss, summed over some of this rank's units, shape [], to that of the step that is taken, and to a turn's part of it."""
        self._losses.add(loss)
        if turn is not None:
            self._of_turns[turn].add(loss)

    def begin_turns(self, turns: Iterable[str]) -> None:
        """Note the turns of the step that is being taken, of an objective that takes some."""
        self._taken.append([*turns])

    def end_step(self, weight: float | Tensor, *, samples: int) -> None:
        """Count a step: the samples of its global batch, and the weight that the losses of all ranks are the sum over."""
        self._weights.append(weight)
        self.steps += 1
        self.samples += samples

    def read(self, world: World, grad_norm: Tensor | None = None, logged: Logged | None = None, *, extra: Sequence[float] = ()) -> Reading:
        """Reduce once what is this rank's alone, and read the device once. Collective.

        Args:
            grad_norm: of the newest step; None: not known.
            logged: what was logged since the last record, which this read is for; None: for none.
            extra: numbers of this rank's host that are added up, too; as many on every rank.
        """
        device = self._losses.values.device
        host = [float(self.skipped), *extra, *(logged.numbers() if logged else ())]
        rest = [torch.tensor(host, dtype=torch.float64).to(device, non_blocking=True), *(logged.sums(device=device) if logged else ())]
        num_rest = sum(map(len, rest))
        own = [*(room.values[: len(self._weights)] for room in self._rooms), *rest]
        on_device = [weight for weight in self._weights if isinstance(weight, Tensor)]
        norms = [*self.norms, *([] if grad_norm is None else [grad_norm])]
        if on_device:
            stacked = torch.stack(on_device).double()
            own.append(stacked if self._own_weights or world.is_main else torch.zeros_like(stacked))  # all ranks have the same: once
        if norms:
            own.append(torch.stack(norms).double().square())
        values = iter(world.sum(torch.cat(own)).tolist())
        totals = [next(values) for _ in self._weights]
        turns = {name: [next(values) for _ in self._weights] for name in self._of_turns}
        num_skipped, *others = [next(values) for _ in range(num_rest)]
        weights = [next(values) if isinstance(weight, Tensor) else float(weight) for weight in self._weights]
        rms = [math.sqrt(next(values) / world.size) for _ in norms]  # of what is alike on all ranks, itself
        self._weights = [*weights]
        return Reading(
            totals=totals,
            weights=weights,
            norms=rms[: len(self.norms)],
            grad_norm=None if grad_norm is None else rms[-1],
            skipped=int(num_skipped),
            turns=turns,
            extra_sums=others[: len(extra)],
            logged=others[len(extra) :],
        )

    def turns_of(self, place: int) -> str:
        """Name the turns of a step; "" where the objective takes none."""
        return ", ".join(self._taken[place]) if self._taken else ""

    def turn_means(self, reading: Reading) -> dict[str, float]:
        """Return the mean loss of each turn, as `loss_<turn>`, over the steps that count and took it; of a turn without such steps none."""
        means = {}
        for name, totals in reading.turns.items():
            places = [place for place, taken in enumerate(self._taken) if name in taken and self._weights[place]]
            if places:
                means[loss_of(name)] = sum(totals[place] for place in places) / sum(float(self._weights[place]) for place in places)
        return means

    def leave_out_steps(self, places: Sequence[int]) -> None:
        """Count these steps for nothing: they were not taken."""
        for place in places:
            for room in self._rooms:
                room.values[place] = 0.0
            self._weights[place] = 0.0

    def sums(self, logged: Logged | None = None) -> WindowSums:
        """Read from the device what a checkpoint needs. The weights are known since `read`."""
        losses, *of_turns = (room.values[: len(self._weights)].tolist() for room in self._rooms)
        return WindowSums(
            losses,
            [float(weight) for weight in self._weights],
            self.skipped,
            self.skipped_steps,
            turns=dict(zip(self._of_turns, of_turns, strict=True)),
            taken=[list(names) for names in self._taken],
            **(logged.state() if logged else {}),
        )

    def leave_out(self, since: float) -> None:
        """Take the time since `since` (an evaluation, a save) out of the time per step."""
        self.started += time.perf_counter() - since


class _Room:
    """A number for each step of a window, float64, the first ones with `values`, and room for more."""

    def __init__(self, values: Sequence[float], device: torch.device) -> None:
        self.values = torch.zeros(len(values) + _INITIAL_STEPS, dtype=torch.float64, device=device)
        self.values[: len(values)] = torch.tensor(values, dtype=torch.float64)
        self._place = 0
        self._view()

    def _view(self) -> None:
        """View each number: on the CPU as the host's own, in a tenth of the time that torch takes to add to a tensor."""
        self._on_host = is_host(self.values.device)
        self._of_steps: Any = self.values.numpy() if self._on_host else self.values.unbind()  # once: a view takes as long as an addition

    def begin(self, place: int) -> None:
        """Let `add` count for a step, the one after the last at most."""
        if place == len(self.values):
            self.values = torch.cat([self.values, torch.zeros_like(self.values)])
            self._view()
        self._place = place

    def add(self, number: Tensor) -> None:
        """Add a number, shape []."""
        if self._on_host:
            self._of_steps[self._place] += number.item()
        else:
            sum_of_step = self._of_steps[self._place]
            sum_of_step += number.detach()
