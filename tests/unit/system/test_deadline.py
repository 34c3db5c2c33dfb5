"""Waiting ends with the answer or with the time."""

from __future__ import annotations

import sys
import time
import traceback
from itertools import count

import pytest

from ddp_train.system.deadline import wait_until
from ddp_train.system.stack_dump import describe_stack


def test_it_is_asked_once_at_least_and_until_the_time_is_over() -> None:
    asked = count()
    assert not wait_until(lambda: next(asked) < 0, within_s=0.0, every_s=60.0)
    assert next(asked) == 1
    assert wait_until(lambda: next(asked) >= 5, within_s=60.0, every_s=0.001)
    began = time.monotonic()
    assert not wait_until(lambda: False, within_s=0.05, every_s=0.01)
    assert 0.05 <= time.monotonic() - began < 5


def test_a_stack_shows_who_waits() -> None:
    seen: list[str] = []

    def look() -> bool:
        seen.append(describe_stack(traceback.extract_stack(sys._getframe(1))))  # from `wait_until` on
        return True

    assert wait_until(look, within_s=1.0, every_s=0.1)
    assert "test_deadline.py" in seen[0] and "in test_a_stack_shows_who_waits" in seen[0]


def test_what_is_soon_so_is_asked_often_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert wait_until(lambda: len(waits) == 6, within_s=60.0, every_s=0.02, first_s=0.001)
    assert waits == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02]
