"""Metrics by `_target_`: what the ranks have comes to what one would have that has seen all samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.interfaces import Ratio, Value
from ddp_train.training.build.make import as_metric
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.metric import FunctionMetric, KeptMetric, ValueTotals, require_numbers, results, update
from tests.unit.parts import checked, components

torch.manual_seed(0)
PREDICTIONS, TARGETS = torch.randn(20), torch.randn(20)
SHARES = [[20], [7, 13], [1, 6, 13], [3, 3, 3, 3, 3, 3, 2, 0]]  # samples of each rank; the last one has none


def dim_zero_sum(values: Tensor) -> Tensor:
    return values.sum(dim=0)


def dim_zero_max(values: Tensor) -> Tensor:
    return values.max(dim=0).values


def dim_zero_mean(values: Tensor) -> Tensor:
    return values.mean(dim=0)


def dim_zero_cat(values: Any) -> Tensor:
    return torch.cat(list(values))


class Everything(nn.Module):
    """Made as torchmetrics makes its metrics, with every kind of state."""

    higher_is_better = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self._reductions = {
            "total": dim_zero_sum,
            "largest": dim_zero_max,
            "bound": dim_zero_mean,
            "joined": dim_zero_cat,
            "seen": dim_zero_cat,
            "raw": None,
        }
        self._defaults: dict[str, Any] = dict.fromkeys(self._reductions, 0) | {"seen": [], "raw": []}
        self.reset()

    def reset(self) -> None:
        self.total, self.largest, self.bound = torch.zeros(()), torch.tensor(-torch.inf), torch.tensor(5.0)
        self.joined, self.seen, self.raw = torch.zeros(0), list[Tensor](), list[Tensor]()

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total, self.largest = self.total + targets.sum(), torch.maximum(self.largest, predictions.max())
        self.joined = torch.cat([self.joined, predictions])
        self.seen.append(predictions)
        self.raw.append(targets[:1])

    def compute(self) -> dict[str, Tensor]:
        order = torch.cat([self.joined, *self.seen])
        return {"total": self.total, "largest": self.largest, "bound": self.bound, "last": order[-1], "of": torch.tensor(len(order))}


def over_ranks(make: Any, sizes: list[int], batch: int = 4) -> Any:
    """Return the value of a metric whose ranks have so many samples each."""
    states, metric = [], make()
    for predictions, targets in zip(PREDICTIONS.split(sizes), TARGETS.split(sizes), strict=True):
        metric = make()
        for pair in zip(predictions.split(batch), targets.split(batch), strict=True):
            if len(pair[0]):
                metric.update(*pair)
        states.append(metric.state())
    return make().result([state for state in states if state is not None])


@pytest.mark.parametrize("sizes", SHARES)
def test_states_of_every_kind_are_put_together(sizes: list[int]) -> None:
    found = {name: float(value) for name, value in over_ranks(lambda: KeptMetric(Everything()), sizes).items()}
    assert found == {
        "total": pytest.approx(float(TARGETS.sum()), rel=1e-5),
        "largest": float(PREDICTIONS.max()),
        "bound": 5.0,
        "last": float(PREDICTIONS[-1]),
        "of": 40.0,
    }


@pytest.mark.parametrize("sizes", SHARES)
def test_a_function_gets_all_predictions_in_the_data_sets_order(sizes: list[int]) -> None:
    predictions, targets = over_ranks(lambda: FunctionMetric(lambda *pair: pair), sizes)
    assert torch.equal(predictions, PREDICTIONS)
    assert torch.equal(targets, TARGETS)


def test_which_way_is_better_is_known() -> None:
    kept, function = KeptMetric(Everything()), FunctionMetric(largest_probability)
    assert kept.goal == "min"
    assert function.goal == "max"
    assert FunctionMetric(lambda predictions, targets: 0.0).goal is None


def test_a_row_and_a_dict_become_several_numbers_and_a_metric_forgets_when_it_is_done() -> None:
    metrics = {"x": FunctionMetric(lambda predictions, targets: {"a": 1, "b": torch.tensor([2.0, 3.0])})}
    update(metrics, (PREDICTIONS, TARGETS))
    assert results(metrics, alone()) == {"x_a": 1.0, "x_b_0": 2.0, "x_b_1": 3.0}
    assert results(metrics, alone()) == {}  # nothing was given since


def test_what_fails_names_its_key() -> None:
    metrics = {"mine": FunctionMetric(lambda predictions, targets: predictions @ targets[:3])}
    with pytest.raises(ConfigError, match=r"evaluation\.metrics\.mine: TypeError"):
        update(metrics, ((PREDICTIONS,), TARGETS))
    update(metrics, (PREDICTIONS, TARGETS))
    with pytest.raises(ConfigError, match=r"evaluation\.metrics\.mine: RuntimeError"):
        results(metrics, alone())
    for wrong in (nn.Linear(2, 2), 3, Everything):
        with pytest.raises(ConfigError, match=r"evaluation\.metrics\.mine\._target_"):
            as_metric(wrong, "mine", torch.device("cpu"))


def largest_probability(predictions: Tensor, targets: Tensor, *, num_classes: int = 0) -> float:
    assert predictions.shape == (101, num_classes)
    return float(predictions.max())


largest_probability.higher_is_better = True  # type: ignore[attr-defined]
HERE = "tests.unit.training.parts.test_metric"
MINE = [f"+evaluation.metrics.mine._target_={HERE}.largest_probability", "+evaluation.metrics.mine._partial_=true"]


def test_a_function_of_the_users_is_a_metric_of_the_run_with_facts_of_the_data() -> None:
    parts = components(*MINE, "+evaluation.metrics.mine.num_classes=auto", "evaluation.batch_size=16")
    found = evaluate(parts, alone())
    assert found is not None
    assert 0.1 <= found["mine"] <= 1.0
    assert parts.answers["evaluation.metrics.mine.num_classes"] == 10
    assert next(iter(parts.goals)) == "accuracy"
    assert parts.goals["mine"] == "max"
    assert found == evaluate(parts, alone())


def test_skipped_samples_count_in_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components(
        "evaluation.batch_size=16", f"+evaluation.metrics.seen._target_={HERE}.number", "+evaluation.metrics.seen._partial_=true"
    )
    assert parts.eval_loader is not None
    batches = [micro_batch._replace(is_stand_in=place == 0) for place, micro_batch in enumerate(parts.eval_loader)]
    monkeypatch.setattr(type(parts.eval_loader), "__iter__", lambda self: iter(batches))
    found = evaluate(parts, alone())
    assert found is not None and found["seen"] == 101 - 16


def number(predictions: Tensor, targets: Tensor) -> int:
    return len(np.asarray(targets))


def test_a_function_needs_no_partial() -> None:
    assert checked(MINE[0]).evaluation.metrics["mine"]["_partial_"] is True


def test_what_cannot_be_a_metric_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigErrors, match=r"evaluation\.metrics\.mine\.predictions: .* needs this argument"):
        checked(MINE[0], "+evaluation.metrics.mine._partial_=false")
    with pytest.raises(ConfigError, match="of which neither has a default") as caught:
        as_metric(0.5, "mine", torch.device("cpu"))  # of a function that was called
    assert "_partial_" not in str(caught.value)
    with pytest.raises(ConfigErrors, match=r"torch\.nn has no"):
        checked("+evaluation.metrics.mine._target_=torch.nn.F1")
    with pytest.raises(ConfigErrors, match="_target_"):
        checked("+evaluation.metrics.mine.width=3")
    with pytest.raises(ConfigError, match="has a metric of this name"):
        components(f"+evaluation.metrics.loss._target_={HERE}.number", "+evaluation.metrics.loss._partial_=true")


def test_a_metric_of_the_last_batches_is_refused() -> None:
    running = type("Running", (nn.Module,), {"__module__": "torchmetrics.wrappers.running", "_reductions": {}})
    with pytest.raises(ConfigError, match="covers the last batches only"):
        as_metric(running(), "mine", torch.device("cpu"))


def table(predictions: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros(10, 10)


def test_a_metric_that_gives_no_number_is_refused_before_the_first_step() -> None:
    metrics = {"table": as_metric(table, "table", torch.device("cpu"))}
    metrics["table"].update(torch.zeros(3, 10), torch.zeros(3))
    with pytest.raises(ConfigError, match=r"gave a tensor \[10, 10\]"):
        require_numbers(metrics)


def test_an_objective_that_compares_nothing_is_told_what_to_give_and_how_to_leave_the_metric_out() -> None:
    metrics = {"f1": as_metric(number, "f1", torch.device("cpu"))}
    with pytest.raises(ConfigError, match=r"evaluation\.metrics: has f1, (.|\n)*compared=(.|\n)*fix: ~evaluation\.metrics\.f1"):
        update(metrics, None)
    update({}, None)


def _added(totals: ValueTotals, *batches: tuple[dict[str, Value], int]) -> ValueTotals:
    for values, size in batches:
        totals.add(values, size=size, counts=True)
    return totals


MASK = torch.tensor([[True, False, False], [True, True, True]])
LOSSES = torch.tensor([[3.0, math.inf, math.nan], [1.0, 2.0, 4.0]])


@pytest.mark.parametrize(
    ("whole", "parts", "mean"),
    [
        ((torch.tensor([1.0, 2.0, 6.0]), 3), [(torch.tensor([1.0]), 1), (torch.tensor([2.0, 6.0]), 2)], 3.0),
        ((torch.tensor([True, False, True]), 3), [(torch.tensor([True]), 1), (torch.tensor([False, True]), 2)], 2 / 3),
        ((torch.tensor(3.0), 3), [(torch.tensor(1.0), 1), (torch.tensor(4.0), 2)], 3.0),
        (
            (Ratio(LOSSES.where(MASK, 0.0), MASK), 2),
            [(Ratio(LOSSES[:1].where(MASK[:1], 0.0), MASK[:1]), 1), (Ratio(LOSSES[1:], 3), 1)],
            2.5,
        ),
        (
            (Ratio(MASK, torch.ones(2, 3, dtype=torch.int64), by_column=True), 2),
            [(Ratio(MASK[:1], 1, by_column=True), 1), (Ratio(MASK[1:], 1, by_column=True), 1)],
            [1.0, 0.5, 0.5],
        ),
    ],
    ids=["numbers of samples", "whether", "means", "ratios", "columns"],
)
def test_means_are_over_all_samples_whatever_the_batches(whole: Any, parts: Any, mean: Any) -> None:
    if not isinstance(whole[0], Ratio) or not isinstance(parts[-1][0].denominator, int):
        assert _added(ValueTotals(), *(({"it": value}, size) for value, size in parts)).means(_alone)["it"] == pytest.approx(mean)
    assert _added(ValueTotals(), ({"it": whole[0]}, whole[1])).means(_alone)["it"] == pytest.approx(mean)


def _alone(sums: Tensor) -> Tensor:
    return sums


def test_ranks_sums_are_added_in_three_reductions_and_a_stand_in_counts_nothing() -> None:
    mine, told = ValueTotals(), list[Tensor]()
    values: dict[str, Value] = {"right": torch.tensor([True, False]), "loss": torch.tensor(0.5), "iou": Ratio(MASK, MASK, by_column=True)}
    mine.add(values, size=2, counts=True)
    mine.add(values, size=2, counts=False)  # of a rank that is done: the names alone

    def of_two_ranks(sums: Tensor) -> Tensor:
        told.append(sums)
        return 2 * sums

    assert mine.means(of_two_ranks) == {"right": 0.5, "loss": 0.5, "iou": [1.0, 1.0, 1.0]}
    assert [each.dtype for each in told] == [torch.int64, torch.float64, torch.int64]


def test_a_mean_of_nothing_is_0_and_in_a_column_not_a_number_and_integers_are_exact() -> None:
    nothing: dict[str, Value] = {
        "tokens": Ratio(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)),
        "classes": Ratio(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0, 1], [0, 1]]), by_column=True),
    }
    means = _added(ValueTotals(), (nothing, 2)).means(_alone)
    assert means["tokens"] == 0.0 and math.isnan(means["classes"][0]) and means["classes"][1] == 0.0
    large = 2**60 + 1  # float64 has 53 bits
    exact: dict[str, Value] = {"it": Ratio(torch.tensor([large, -(2**60)]), 1)}
    assert _added(ValueTotals(), (exact, 2)).means(_alone) == {"it": 1.0}
    stand_in = ValueTotals()
    stand_in.add({"it": torch.ones(2)}, size=2, counts=False)
    assert stand_in.means(_alone)["it"] == 0.0
