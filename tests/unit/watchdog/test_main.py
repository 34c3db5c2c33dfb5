"""The process that watches, without ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_train.watchdog.__main__ import _Job
from ddp_train.watchdog.client import WatchRequest


@pytest.mark.parametrize(
    ("limit_s", "still_s", "next_in_s"),
    [(1800, 0, 1.0), (1800, 1700, 1.0), (1800, 1799, 0.5), (1800, 1799.8, 0.2), (1800, 1900, 0.2), (2, 0.4, 0.8), (None, 9e9, 1.0)],
)
def test_it_looks_the_sooner_the_nearer_a_rank_is_to_its_limit(
    tmp_path: Path, limit_s: float | None, still_s: float, next_in_s: float
) -> None:
    job = _Job(
        WatchRequest(
            run_folder=str(tmp_path),
            start_timeout_s=limit_s,
            step_timeout_s=limit_s,
            uses_device=False,
            shows=False,
            pids={0: os.getpid()},  # which has no heartbeat, and so none since the job began
            world_size=2,  # the other one is elsewhere, and may be to blame: nobody here is ended
        )
    )
    job.look(job._began + still_s)
    assert job.calm_s() == pytest.approx(next_in_s, abs=0.01)
