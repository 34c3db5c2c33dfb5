"""What the loop makes of what an objective returns; rows of all ranks have the gradient of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.interfaces import Batch, BatchLoss, Evaluated, Objective, Ratio, TurnObjective
from ddp_train.interfaces.objective import ValueShapeError, evaluate_batch, loss_sum, value_sums
from tests.unit.interfaces import gathering

BATCH = (torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0]))
MODEL = nn.Identity()


class Giving(Objective):
    def __init__(self, loss: Any) -> None:
        self.given = loss

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return self.given


class Turning(TurnObjective):
    turns = {"a": ["a"], "b": ["b"]}  # noqa: RUF012

    def turn_loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        return torch.tensor(1.0) if turn == "a" else torch.ones(4)


@pytest.mark.parametrize(
    ("loss", "total", "units"),
    [
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), 10.0, 4),
        (torch.tensor(2.5), 10.0, 4),
        (Ratio(torch.tensor([[1.0], [2.0]]), torch.tensor([True, False])), 3.0, 1),
        (Ratio(torch.tensor(6.0), 12), 6.0, 12),
    ],
)
def test_a_loss_is_a_sum_over_units(loss: Any, total: float, units: int) -> None:
    found = loss_sum(Giving(loss), MODEL, BATCH)
    assert (float(found.total), int(found.num_units)) == (total, units)


@pytest.mark.parametrize("loss", [torch.ones(3), torch.ones(4, 1), torch.ones(4, 4), 1.0, None, Ratio(torch.ones(4, 2), 1, by_column=True)])
def test_a_loss_of_another_form_is_refused(loss: Any) -> None:
    with pytest.raises(ValueShapeError, match="for 4 samples, and not one value for each"):
        loss_sum(Giving(loss), MODEL, BATCH)
    if not isinstance(loss, Ratio):
        with pytest.raises(ValueShapeError, match="as 'it' for 4 samples"):
            value_sums("it", loss, 4)


def test_turns_are_added_and_each_is_over_samples() -> None:
    assert [(loss.total, loss.num_units) for loss in (loss_sum(Turning(), MODEL, BATCH, turn) for turn in "ab")] == [(4.0, 4)] * 2
    together = loss_sum(Turning(), MODEL, BATCH)
    assert (together.total, together.num_units) == (8.0, 4)


def test_by_default_an_evaluation_reports_the_loss_and_its_samples_are_rows() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert evaluate_batch(Giving(losses), MODEL, BATCH) == Evaluated({"loss": losses}, {"loss": losses})
    assert not evaluate_batch(Giving(torch.tensor(1.0)), MODEL, BATCH).rows


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (torch.ones(4, 2), ["output"]),
        ((torch.ones(4), torch.ones(3), torch.ones(4, 2)), ["output_0", "output_2"]),
        ({"logits": torch.ones(4, 2), "aux": torch.tensor(1.0)}, ["logits"]),
    ],
)
def test_what_a_model_gives_for_each_sample_is_inferred(outputs: Any, names: list[str]) -> None:
    class Model(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return outputs

    assert list(Giving(None).infer(Model(), (BATCH[0],))) == names


def test_gathered_rows_give_the_gradient_of_one_process() -> None:
    command = [sys.executable, "-m", "tests.unit.interfaces.gathering"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda rank: rank["rank"])
    expected = gathering.gradient(*gathering.model_and_batch(), is_wrapped=False)
    for rank in found:
        assert rank["gradient"] == pytest.approx(expected, rel=1e-10)
        assert rank["tried"] == gathering.SAMPLES // gathering.RANKS


def test_alone_nothing_is_gathered() -> None:
    class Gathering(BatchLoss):
        gathers = True

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return self.gather(batch[0]).mean()

    rows = torch.ones(2, 3)
    assert Gathering().gather(rows) is rows
