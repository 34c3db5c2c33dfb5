"""End a run when a metric of its evaluations has stopped improving."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, Run


class EarlyStopping(Callback):
    """Stops the run after `patience` evaluations in a row without an improvement. A metric that is not finite is none.

    Args:
        metric: of the evaluation, as `loss` or `eval/loss`; None: the headline metric.
        goal: which way is better; None: as the objective says of this metric.
        patience: evaluations without an improvement; at least 1.
        min_delta: a smaller change is no improvement; in the metric's unit.
    """

    needs_evaluation = True
    argument_ranges: ClassVar = {"patience": {"min": 1}}

    def __init__(
        self, metric: str | None = None, *, goal: Literal["min", "max"] | None = None, patience: int = 5, min_delta: float = 0.0
    ) -> None:
        self._metric = metric.removeprefix("eval/") if metric is not None else None
        self._goal, self._patience, self._min_delta = goal, patience, min_delta
        self._best: float | None = None
        self._best_step = self._num_bad = 0

    def on_start(self, run: Run) -> None:
        self._metric = self._metric or next(iter(run.goals), "")
        self._goal = self._goal or run.goals.get(self._metric)
        if self._goal is None:
            happened = f"is {self._metric!r}, and the run does not know whether a higher value is better"
            raise ConfigError(key=".metric", happened=happened, expected=f"one of {', '.join(run.goals)}, or a `goal`: min or max")
        self._judge(run)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        assert self._metric is not None
        if self._metric not in metrics:
            happened = f"is {self._metric!r}, which the evaluation does not measure"
            raise ConfigError(key=".metric", happened=happened, expected=f"one of {', '.join(metrics)}")
        value = metrics[self._metric]
        if self._is_better(value):
            self._best, self._best_step, self._num_bad = value, run.step, 0
        else:
            self._num_bad += 1
        self._judge(run)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "best": self._best, "best_step": self._best_step, "num_bad": self._num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._metric is None or state["metric"] in (None, self._metric):  # another metric starts anew
            self._best, self._best_step, self._num_bad = state["best"], state["best_step"], state["num_bad"]

    def _is_better(self, value: float) -> bool:
        if self._best is None or not math.isfinite(value):
            return math.isfinite(value)
        return value < self._best - self._min_delta if self._goal == "min" else value > self._best + self._min_delta

    def _judge(self, run: Run) -> None:
        if self._num_bad >= self._patience:
            since = "was never finite" if self._best is None else f"has not improved on {self._best:.4g} (step {self._best_step})"
            run.stop(f"eval/{self._metric} {since} for {self._num_bad} evaluations")
