"""What a value of the config may be."""

from __future__ import annotations

import pytest

from ddp_train.config.values import node_range, seconds_of


def test_a_range_of_nodes() -> None:
    assert [node_range(value) for value in (1, "3", "1:4")] == [(1, 1), (3, 3), (1, 4)]
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
