"""What an evaluation adds up: the values of the objective, and metrics by `_target_` (`evaluation.metrics.<name>`).

Of the latter each rank updates its own, and rank 0 puts all of them together after the loop.

Two kinds, both exact on any number of ranks, as every sample is evaluated once and a rank's share is contiguous:

    torchmetrics    what it keeps is put together as it says itself: sums added, least and largest taken, lists joined in the data's order
    a function      of all predictions and all targets, which rank 0 gathers: f(predictions, targets) -> a number, or a dict of them

Nothing here imports torchmetrics: a metric is known by what it offers.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.config.schema import EVALUATION_METRICS
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Goal, Objective, Value
from ddp_train.interfaces.batch import describe, map_tensors
from ddp_train.interfaces.objective import value_sums
from ddp_train.traits import function_of

logger = logging.getLogger(__name__)


class ValueTotals:
    """Adds up the values of an objective's `evaluate`: over batches, then over the ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # numerators, and the denominators that are on the device
        self._counts: dict[str, int] = {}  # denominators that the host knows

    def add(self, values: Mapping[str, Value], *, size: int, counts: bool) -> None:
        """Add the values of a batch of `size` samples; with `counts=False` their names alone."""
        for name, value in values.items():
            numerator, denominator = value_sums(name, value, size)
            self._add(name, numerator, counts=counts)
            if isinstance(denominator, Tensor):
                self._add(_denominator(name), denominator, counts=counts)
            else:
                self._counts[name] = self._counts.get(name, 0) + (denominator if counts else 0)

    def means(self, sums: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the means over all ranks by name: a number, 0 where nothing counts; for columns a list, with NaN there.

        Collective as `sums` is.

        Integers are added as such, and stay exact.
        """
        counted = sums(torch.tensor([*self._counts.values()], dtype=torch.int64)).tolist() if self._counts else []
        totals: dict[str, Any] = dict(zip(map(_denominator, self._counts), counted, strict=True))
        for is_float in (True, False):
            addends = {name: value for name, value in self._sums.items() if value.is_floating_point() == is_float}
            if addends:
                summed = sums(torch.cat([value.reshape(-1) for value in addends.values()])).cpu()  # the only wait for the device
                parts = summed.split([value.numel() for value in addends.values()])
                totals |= {name: part.view(addends[name].shape).tolist() for name, part in zip(addends, parts, strict=True)}
        return {name: _divide(totals[name], totals[_denominator(name)]) for name in self._sums if _denominator(name) in totals}

    def _add(self, name: str, value: Tensor, *, counts: bool) -> None:
        total = self._sums.get(name)
        if total is None:
            self._sums[name] = value if counts else torch.zeros_like(value)
        elif counts:
            self._sums[name] = total + value


def _denominator(name: str) -> str:
    return f"{name} /"


def _divide(total: Any, count: Any) -> Any:
    if isinstance(total, list):
        counts = count if isinstance(count, list) else [count] * len(total)
        return [part / number if number else math.nan for part, number in zip(total, counts, strict=True)]
    return total / count if count else 0.0


class KeptMetric:
    """A metric as those of torchmetrics are: `update`, `compute`, and states that say how they are reduced. It is where it computes."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric: Any = metric
        self._parts: list[Any] = [part for part in metric.modules() if hasattr(part, "_reductions")]  # a wrapper has its metric inside
        for part in self._parts:
            part.distributed_available_fn = lambda: False  # it would gather by itself, in a way that hangs where a rank has no sample
        self.goal: Goal | None = _goal(metric)  # None: it has no direction, and no best value is kept
        self._samples = 0

    def reset(self) -> None:
        self._metric.reset()
        self._samples = 0

    def update(self, predictions: Any, targets: Any) -> None:
        self._metric.update(predictions, targets)
        self._samples += len(targets)

    def state(self) -> Any:
        """Return this rank's state, on the CPU; None: it was given nothing."""
        if not self._samples:
            return None
        kept = [{name: getattr(part, name) for name in part._reductions} for part in self._parts]
        return self._samples, map_tensors(lambda tensor: tensor.detach().cpu(), kept)

    def result(self, states: Sequence[Any]) -> Any:
        """Return the value over all ranks' states, in the order of the ranks: a number, a row of them, or a dict (rank 0)."""
        device = self._metric.device
        samples = [state[0] for state in states]
        kept = map_tensors(lambda tensor: tensor.to(device), [state[1] for state in states])
        for place, part in enumerate(self._parts):
            for name, reduction in part._reductions.items():
                setattr(part, name, _joined([state[place][name] for state in kept], reduction, samples))
            part._computed = None
        return self._metric.compute()


def _goal(metric: object) -> Goal | None:
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else "max" if higher else "min"


def _joined(values: list[Any], reduction: Callable[[Tensor], Tensor] | None, samples: list[int]) -> Any:
    """Return one state of all ranks', as torchmetrics would from one that has seen all samples."""
    kind = getattr(reduction, "__name__", "")
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1:
        return values[0]
    if kind == "dim_zero_cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    stacked = torch.stack(values)
    if reduction is None:
        return stacked  # which such a metric puts together by itself
    if kind == "dim_zero_mean":  # of ranks that have not seen the same number
        shares = torch.tensor(samples, dtype=torch.float64, device=stacked.device) / sum(samples)
        return (stacked * shares.view(-1, *[1] * (stacked.ndim - 1))).sum(dim=0).to(stacked.dtype)
    return reduction(stacked)


class FunctionMetric:
    """A function of all predictions and all targets; an attribute `higher_is_better` may say which way is better."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        self._function = function
        self.goal: Goal | None = _goal(function_of(function))
        self._seen: list[tuple[Tensor, Tensor]] = []

    def reset(self) -> None:
        self._seen = []

    def update(self, predictions: Any, targets: Any) -> None:
        if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
            raise TypeError(f"a function takes tensors; predictions are {describe(predictions)}, targets {describe(targets)}")
        self._seen.append((predictions.detach().cpu(), targets.detach().cpu()))

    def state(self) -> Any:
        return tuple(torch.cat(column) for column in zip(*self._seen, strict=True)) if self._seen else None

    def result(self, states: Sequence[Any]) -> Any:
        predictions, targets = (torch.cat(column) for column in zip(*states, strict=True))
        return self._function(predictions, targets)


Metric = KeptMetric | FunctionMetric
"""One metric of an evaluation, on one rank."""


def goals_of(objective: Objective, metrics: Mapping[str, Metric], set_names: Iterable[str]) -> dict[str, Goal]:
    """Return the goal of each metric, by its recorded name: of each set the objective's, then those of `evaluation.metrics`."""
    goals = {**objective.goals, **{name: metric.goal for name, metric in metrics.items() if metric.goal is not None}}
    return {recorded_name(set_name, name): goal for set_name in set_names for name, goal in goals.items()}


def recorded_name(set_name: str, name: str) -> str:
    """Return the name of an evaluation set's metric in a record: its own where the set has no name."""
    return f"{set_name}/{name}" if set_name else name


def update(metrics: Mapping[str, Metric], compared: tuple[Any, Any] | None) -> None:
    """Give one batch to all metrics; a ConfigError has the key of one that cannot take it."""
    if metrics and compared is None:
        happened = f"has {', '.join(metrics)}, but the objective's `evaluate` gives nothing to compare"
        expected = "`Evaluated(values, compared=(predictions, targets))` (`ddp-train help docs/components.md`)"
        fix = " ".join(f"~{EVALUATION_METRICS}.{name}" for name in metrics)
        raise ConfigError(key=EVALUATION_METRICS, happened=happened, expected=expected, fix=fix)
    predictions, targets = compared or (None, None)
    for name, metric in metrics.items():
        try:
            metric.update(predictions, targets)
        except (ValueError, TypeError, RuntimeError) as error:
            happened = f"{type(error).__name__}: {error}\n  predictions {describe(predictions)}\n  targets     {describe(targets)}"
            expected = "a metric for what the objective compares"
            raise ConfigError(key=f"evaluation.metrics.{name}", happened=happened, expected=expected) from error


def require_numbers(metrics: Mapping[str, Metric]) -> None:
    """Refuse metrics whose value so far is no number and no row or dict of them, and reset them. Other errors say little of few samples."""
    for name, metric in metrics.items():
        try:
            _value(name, metric, [metric.state()])
        except ConfigError as error:
            if isinstance(error.__cause__, TypeError):
                raise
            logger.info("could not check whether %s gives numbers: %s", error.key, error.happened)
        metric.reset()


def results(metrics: Mapping[str, Metric], world: World) -> dict[str, float]:
    """Return the values of all metrics over all ranks, the same on each. Collective. Raises ConfigError: on rank 0, where they are made."""
    if not metrics:
        return {}
    by_rank = world.gather_to_main({name: metric.state() for name, metric in metrics.items()})

    def make_values() -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metric in metrics.items():
            values |= _value(name, metric, [states[name] for states in by_rank])
        return values

    values = world.from_main(make_values)
    for metric in metrics.values():
        metric.reset()  # what it holds grows with the evaluation set
    return values


def _value(name: str, metric: Metric, states: Sequence[Any]) -> dict[str, float]:
    known_states = [state for state in states if state is not None]
    try:
        return _numbers(name, metric.result(known_states)) if known_states else {}
    except Exception as error:  # of the user's code
        expected = "a metric whose value is a number, a row of numbers, or a dict of them"
        raise ConfigError(key=f"evaluation.metrics.{name}", happened=f"{type(error).__name__}: {error}", expected=expected) from error


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return a metric's value as numbers: a row's are NAME_0, NAME_1, ...; a dict's NAME_KEY."""
    if isinstance(value, Mapping):
        return {key: number for part, inner in value.items() for key, number in _numbers(f"{name}_{part}", inner).items()}
    if isinstance(value, Tensor) and value.ndim == 1 and len(value) > 1:
        return {f"{name}_{place}": float(number) for place, number in enumerate(value.tolist())}
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"gave a tensor {list(value.shape)}, and not a number, a row of them or a dict")
    return {name: float(value)}
