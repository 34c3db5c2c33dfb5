"""The state of a run apart from its components: its position, its best values, and the sums since the last log step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from ddp_train.traits import Goal


@dataclass(frozen=True)
class WindowSums:
    """The sums of the steps since the last log step, for a checkpoint between two log steps."""

    losses: list[float] = field(default_factory=list)  # of each step, over one rank's units
    num_units: list[float] = field(default_factory=list)  # of each step, over all ranks
    skipped_samples: int = 0  # on one rank
    skipped_steps: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)  # by callbacks and the model on one rank: name -> sum, finite ones, calls
    end_request: dict[str, str] | None = None  # the fields of an `EarlyEnd` that a callback of one rank requests; not agreed on yet
    turn_losses: dict[str, list[float]] = field(default_factory=dict)  # by turn: its part of `losses`
    turns_of_steps: list[list[str]] = field(default_factory=list)  # of each step, where an objective takes turns

    @staticmethod
    def merged(windows: Sequence[WindowSums], *, is_main: bool) -> WindowSums:
        """Return one rank's sums after a change of the world size: rank 0 gets the sums over all `windows`, the others zeros."""
        first = windows[0]
        zeros = WindowSums([0.0] * len(first.losses), first.num_units, 0, first.skipped_steps, turns_of_steps=first.turns_of_steps)
        if not is_main:
            return zeros
        logged: dict[str, list[float]] = {}
        for name, parts in chain.from_iterable(window.logged.items() for window in windows):
            logged[name] = [total + part for total, part in zip(logged.get(name, [0.0] * len(parts)), parts, strict=True)]
        return replace(
            zeros,
            losses=_sum_columns(window.losses for window in windows),
            skipped_samples=sum(window.skipped_samples for window in windows),
            logged=logged,
            end_request=next((window.end_request for window in windows if window.end_request), None),
            turn_losses={name: _sum_columns(window.turn_losses[name] for window in windows) for name in first.turn_losses},
        )


def _sum_columns(rows: Iterable[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Jump:
    """One rewind: from which step back to which, while the data went on."""

    from_step: int
    to_step: int
    undone: tuple[int, int]  # the positions [start, stop) of samples whose training was undone


@dataclass(frozen=True, kw_only=True)
class EarlyEnd:
    """The end of a run before its last step, on which all ranks have agreed."""

    callback: str  # its name
    reason: str
    settings: str  # the callback's config, as JSON: with another config the run may go on

    @classmethod
    def at(cls, callback: str, reason: str, callback_configs: Mapping[str, Any]) -> EarlyEnd:
        """Return the end that a callback requests."""
        return cls(callback=callback, reason=reason, settings=_settings(callback, callback_configs))

    def holds(self, callback_configs: Mapping[str, Any]) -> bool:
        """Tell whether the callback still has the same settings: else, or without it, the run goes on."""
        return self.callback in callback_configs and self.settings == _settings(self.callback, callback_configs)

    def __str__(self) -> str:
        return f"callbacks.{self.callback}: {self.reason}"


def _settings(name: str, callback_configs: Mapping[str, Any]) -> str:
    return json.dumps(callback_configs.get(name), sort_keys=True, default=str)


@dataclass(frozen=True)
class Best:
    """The best value of a metric so far, and the step that it belongs to."""

    value: float
    step: int

    def is_beaten_by(self, value: float, goal: Goal) -> bool:
        return value > self.value if goal == "max" else value < self.value


@dataclass
class TrainState:
    """Where a run is, and what a checkpoint keeps of it."""

    step: int = 0
    position: int = 0  # the data's: how many samples were trained on or jumped over, all ranks and epochs
    best: dict[str, Best] = field(default_factory=dict)  # by metric
    evaluation_pending: bool = False  # a stop came between the step and its evaluation
    losses: dict[str, list[float]] = field(default_factory=dict)  # of the last steps by their turns, only where spikes are looked for
    skipped_in_a_row: int = 0  # steps, up to the last one that was judged
    jumps: list[Jump] = field(default_factory=list)  # every rewind so far
    early_end: EarlyEnd | None = None  # by a callback: there is nothing left to do
    logged_names: list[str] = field(default_factory=list)  # what callbacks and the model log, as all ranks have agreed
    saved_window: WindowSums | None = None  # of the checkpoint that was resumed from; differs between ranks

    @property
    def steps_run(self) -> int:
        """All steps that were run, also those that a rewind has undone: unlike `step` it only grows."""
        return self.step + sum(jump.from_step - jump.to_step for jump in self.jumps) if self.jumps else self.step

    def is_over(self, total_steps: int) -> bool:
        return self.step >= total_steps or self.early_end is not None

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "saved_window"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in vars(self).keys() - {"saved_window"}:
            setattr(self, name, state[name])
        self.early_end = EarlyEnd(**state["early_end"]) if state["early_end"] else None
        self.best = {metric: Best(**best) for metric, best in state["best"].items()}
        self.jumps = [Jump(**{**jump, "undone": tuple(jump["undone"])}) for jump in state["jumps"]]
