"""What a value of the config may be."""

from __future__ import annotations

import pytest

from ddp_train.config.values import NodeRange, missed_range, node_range, seconds_of


@pytest.mark.parametrize(
    ("value", "rule", "missed"),
    [
        (0, {"min": 1}, "at least 1"),
        (0.0, {"above": 0}, "more than 0"),
        (1.0, {"min": 0, "below": 1}, "at least 0 and less than 1"),
        (float("nan"), {"min": 0}, "at least 0"),
        (1, {"min": 1}, ""),
        (0.5, {"above": 0, "below": 1}, ""),
    ],
)
def test_a_value_out_of_its_range_is_told_the_range(value: float, rule: dict[str, float], missed: str) -> None:
    assert missed_range(value, rule) == missed


def test_a_range_of_nodes() -> None:
    assert [node_range(value) for value in (1, "3", "1:4")] == [NodeRange(1, 1), NodeRange(3, 3), NodeRange(1, 4)]
    for wrong in (0, -1, "4:2", "1:", "a", "0:2", True, 1.5, "1:2:3"):
        with pytest.raises(ValueError, match="MIN:MAX"):
            node_range(wrong)


def test_a_walltime_is_read_as_slurm_writes_it() -> None:
    given = {"00:01:30": 90, "12:00:00": 43_200, "2-01:00:00": 176_400, 90: 5_400, "90": 5_400}
    assert {value: seconds_of(value) for value in given} == given
    for wrong in ("1:30", "12h", "1-12", -5, True, 1.5):
        with pytest.raises(ValueError, match="HH:MM:SS"):
            seconds_of(wrong)
    with pytest.raises(ValueError, match='in quotes: "12:00:00"'):
        seconds_of(43_200)  # what YAML makes of 12:00:00
