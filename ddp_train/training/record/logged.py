"""What callbacks and the model log between two records: sums that stay on the device until the log step reads them.

A mean is that of the finite values, counted on the device, too: a step that `health.on_nonfinite=skip` leaves out spoils no record.

Ranks need not log the same names. Each read has, in the reduction that it makes anyway, one number for names that are not agreed on yet.
Only where there are some, ranks tell each other, and these names' sums take a reduction of their own, that once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.model_log import Sink
from ddp_train.training.record import throughput
from ddp_train.training.train_state import Stopped, TrainState, WindowSums

_OURS = ("loss", "lr", "grad_norm", "skipped_samples", "skipped_steps", *throughput.NAMES)
_NOTHING: Sequence[float] = (0.0, 0.0, 0)
_AXES = ("split", "step", "epoch", "samples", "time")


class Logged:
    """The sums of one rank. The state has the names that all ranks agree on, and learns of a stop; a record has a loss of each turn."""

    def __init__(self, state: TrainState, turns: Collection[str] = ()) -> None:
        self._state = state
        self._taken = (*_OURS, *map(loss_of, turns))
        self._kept: dict[str, list[float | Tensor]] = {}  # name -> the sum, how many values are in it, calls
        self.asked: Stopped | None = None  # to stop, by a callback of this rank

    def add(self, name: str, value: float | Tensor) -> None:
        """Count one value. On the hot path: nothing is read from the device."""
        check(name, value, taken=self._taken)
        number: float | Tensor
        is_finite: float | Tensor
        if isinstance(value, Tensor):
            number = value.detach().reshape(()).to(torch.float64)
            is_finite = torch.isfinite(number)
            number = torch.where(is_finite, number, 0.0)
        else:
            is_finite = float(math.isfinite(value))
            number = float(value) if is_finite else 0.0
        total, count, calls = self._kept.get(name, _NOTHING)
        self._kept[name] = [total + number, count + is_finite, calls + 1]

    def sink(self) -> Sink:
        """Return `add` for what torch.compile may have compiled: called there and not traced, or each count would be compiled anew."""
        add: Sink = torch.compiler.disable(self.add) if "torch._dynamo" in sys.modules else self.add  # which takes a second to import
        return add

    def numbers(self) -> list[float]:
        """Return what this rank's host knows of the next reduction; as many numbers on every rank."""
        names = self._state.logged_names
        return [float(len(self._new())), float(self.asked is not None), *self._num_calls(names)]

    def sums(self, names: Sequence[str] | None = None, *, device: torch.device) -> list[Tensor]:
        """Return the sums of these names and how many values are in each, of shape [1], float64; None: of those that all agree on."""
        names = self._state.logged_names if names is None else names
        found = [self._kept.get(name, _NOTHING)[part] for part in (0, 1) for name in names]
        return [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(1) for value in found]

    def reduce_and_reset(self, values: list[float], world: World) -> dict[str, float]:
        """Return the means, by what `numbers` and `sums` came to over all ranks, note a stop that any asked for, begin anew. Collective."""
        names = self._state.logged_names
        num_new, num_asked, *rest = values
        calls, sums, finite = (rest[part * len(names) : (part + 1) * len(names)] for part in range(3))
        if num_new:
            new = sorted(set(chain.from_iterable(world.gather(self._new()))))
            own = torch.tensor(self._num_calls(new), dtype=torch.float64)
            more = world.sum(torch.cat([own.to(world.device), *self.sums(new, device=world.device)])).tolist()
            calls, sums, finite = (old + more[part * len(new) : (part + 1) * len(new)] for part, old in enumerate((calls, sums, finite)))
            self._state.logged_names = names = [*names, *new]
        if num_asked:
            self.agree(world)
        self._kept = {}
        values_of = zip(names, calls, sums, finite, strict=True)
        return {name: total / count if count else math.nan for name, called, total, count in values_of if called}

    def agree(self, world: World) -> None:
        """Let the run be stopped if a callback of any rank asked for it: the first rank's reason counts. Collective."""
        found = next((asked for asked in world.gather(self.asked) if asked is not None), None)
        self._state.stopped, self.asked = self._state.stopped or found, None

    def go_on_from(self, sums: WindowSums | None) -> None:
        """Begin with what a checkpoint held."""
        self._kept = {name: [*kept] for name, kept in sums.logged.items()} if sums else {}
        self.asked = Stopped(**sums.asked) if sums and sums.asked else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of it. Reads the device."""
        logged = {name: [float(number) for number in kept] for name, kept in self._kept.items()}
        return {"logged": logged, "asked": vars(self.asked) if self.asked else None}

    def _new(self) -> list[str]:
        return [name for name in self._kept if name not in self._state.logged_names]

    def _num_calls(self, names: Sequence[str]) -> list[float]:
        return [float(self._kept.get(name, _NOTHING)[2]) for name in names]


def loss_of(turn: str) -> str:
    """Return the name that a turn's loss has in a record."""
    return f"loss_{turn}"


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def check(name: str, value: float | Tensor, *, taken: Sequence[str]) -> None:
    """Raise a ValueError for what is no number with a name of its own."""
    if name in taken or name in _AXES:
        raise ValueError(f"log({name!r}, ...): the record has a {name!r} already; another name, as my/{name}")
    if value.numel() != 1 if isinstance(value, Tensor) else not isinstance(value, Real):
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"log({name!r}, ...) takes one number, and got {shown}")
