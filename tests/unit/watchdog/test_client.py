"""What a rank asks of its watchdog."""

from __future__ import annotations

from datetime import timedelta

from ddp_train.watchdog.client import patience


def test_collectives_are_more_patient_than_the_watch() -> None:
    assert patience(1800, 300) > timedelta(seconds=2 * 1800)
    assert patience(None, 300) >= timedelta(days=1)
