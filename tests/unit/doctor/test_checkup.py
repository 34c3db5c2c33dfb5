"""What the ranks add together, and how the doctor's verdict reaches each of them. Whole examinations: tests/cluster/test_doctor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_train.distributed.world import World, alone
from ddp_train.doctor import checkup
from ddp_train.doctor.checkup import check_sums

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Third(World):
    """The third of four ranks, which are all measured here; one of the others may send something wrong."""

    spoilt: int = -1

    def sum(self, values: Tensor) -> Tensor:
        return self._rows(values).sum(0)

    def gather_rows(self, values: Tensor) -> Tensor:
        rows = self._rows(values)
        if self.spoilt >= 0:
            rows[self.spoilt][5] += 1
        return rows

    def _rows(self, values: Tensor) -> Tensor:
        rows = torch.stack([checkup._values(rank, values.dtype, CPU) for rank in range(self.size)])
        assert torch.equal(rows[self.rank], values)
        return rows


def third(**given: Any) -> Third:
    return Third(rank=2, size=4, local_rank=0, local_size=1, device=CPU, **given)


def test_right_sums_are_right() -> None:
    assert check_sums(alone(), CPU) == ""
    assert check_sums(third(), CPU) == ""


def test_wrong_values_are_named_with_the_rank_they_came_from() -> None:
    assert check_sums(third(spoilt=1), CPU) == (
        "what came from rank 1 as torch.int64 on cpu has 11 at index 5, expected 10; 1 values are wrong"
    )


def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Third, "sum", lambda self, values: self._rows(values).sum(0) * 2)
    assert check_sums(third(), CPU).startswith("the sum of torch.int64 on cpu has ")


def test_so_many_ranks_as_there_can_be_add_up_exactly_in_float32() -> None:
    assert 96 * 8 * 20_000 < 2**24


@pytest.mark.parametrize(("clock", "seen"), [(7.0, 0.0), (-60.0, -60.0), (75.0, 75.0), (1.0, 0.0), (-1.0, -1.0)])
def test_a_machine_that_is_late_in_hearing_has_no_other_clock(clock: float, seen: float) -> None:
    """That all are there was said at 1000, and its answer came at 1008."""
    assert checkup._ahead(1000.0 + clock, 1000.0, 1008.0) == seen


def test_speeds_are_positive_numbers() -> None:
    matrix = torch.ones(64, 64)
    assert checkup._seconds(lambda: matrix @ matrix, CPU) > 0
