"""After which steps a checkpoint is saved, and which ones are kept. Imports no torch."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from ddp_train.checkpoint.catalog import CatalogEntry, best_first, saved_checkpoints
from ddp_train.checkpoint.manifest import Ranking
from ddp_train.model_log import values_of


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept when a new one is there: those that `last`, `best` or `every_steps` selects."""

    last: int  # so many of the newest
    ranking: Ranking
    best: int = 0  # so many of the best; of equal ones the earlier is better
    every_steps: int | None = None  # all whose step is a multiple, for ever


@dataclass(kw_only=True)
class CheckpointSchedule:
    """Decides after which steps a checkpoint is saved, on all ranks alike and without a collective."""

    every_evaluation: bool  # whether each evaluation is followed by one
    every_steps: int | None  # between two; None: not by steps
    every_minutes: float | None  # between two; None: not by time
    keep: Retention  # with `best` above 0, an evaluation that is among the best is saved, too
    saved: InitVar[Sequence[CatalogEntry]]  # the checkpoints that there are, the same on every rank
    ask_to_save: Callable[[], bool]  # called when one is due by the clock, of which rank 0's counts; True: one is saved after this step
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self, saved: Sequence[CatalogEntry]) -> None:
        self._last_s = self.clock()
        self.go_back(saved)

    def go_back(self, saved: Sequence[CatalogEntry]) -> None:
        """Forget the metrics from before the run went back: the best ones left behind must not stop others from being saved.

        The checkpoints in `saved`, which there are now, are the same on every rank.
        """
        values = (self.keep.ranking.value(entry.metrics) for entry in saved)
        self._best = sorted((value for value in values if value is not None), reverse=True)
        self._step, self._metrics = -1, dict[str, Any]()

    def note(self, record: Mapping[str, Any]) -> None:
        """Record the metrics of a step: one line of metrics.jsonl."""
        if record["step"] != self._step:
            self._step, self._metrics = record["step"], {}
        self._metrics |= sorted(values_of(record).items())

    def decide(self, step: int, *, is_agreed: bool) -> bool:
        """Decide on every rank whether to save after a step and its evaluation. `is_agreed`: `ask_to_save` has led to this step."""
        is_due = is_agreed or (self.every_steps is not None and step % self.every_steps == 0)
        if step == self._step:  # else nothing was measured
            is_due |= self.every_evaluation and any(name.startswith("eval/") for name in self._metrics)
            is_due |= self._count_if_best(self._metrics)
        if not is_due and self.every_minutes is not None and self.clock() - self._last_s >= 60 * self.every_minutes:
            is_due = self.ask_to_save()
        if is_due:
            self._last_s = self.clock()
        return is_due

    def metrics_of(self, step: int) -> dict[str, Any]:
        return self._metrics if step == self._step else {}

    def _count_if_best(self, metrics: Mapping[str, Any]) -> bool:
        """Count a step's evaluation if it is one of the best so far, and return whether it is. The training loss is no evaluation."""
        value = self.keep.ranking.value(metrics)
        if value is None or self.keep.best == 0 or not self.keep.ranking.metric.startswith("eval/"):
            return False
        if len(self._best) >= self.keep.best and value <= self._best[self.keep.best - 1]:
            return False
        self._best = sorted([*self._best, value], reverse=True)[: self.keep.best]
        return True


def to_remove(saved: Sequence[CatalogEntry], keep: Retention) -> list[CatalogEntry]:
    """Return the checkpoints that are not kept, of all that there are."""
    newest = sorted(saved, key=lambda entry: entry.step, reverse=True)[: keep.last]
    steps_kept = {entry.step for entry in [*newest, *best_first(saved, keep.ranking)[: keep.best]]}
    return [entry for entry in saved if entry.step not in steps_kept and not (keep.every_steps and entry.step % keep.every_steps == 0)]


def remove_old(folder: Path, keep: Retention) -> None:
    """Remove the checkpoints that are not kept. Called after a new one is published, by rank 0."""
    for old in to_remove(saved_checkpoints(folder), keep):
        shutil.rmtree(old.path.rename(old.path.with_name(f".removed_{old.path.name}")))  # never half a checkpoint under a good name
