"""The process that watches, without ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_train.watchdog.__main__ import _WatchedRanks
from ddp_train.watchdog.client import WatchRequest


@pytest.mark.parametrize(
    ("limit_s", "still_s", "next_in_s"),
    [(1800, 0, 1.0), (1800, 1700, 1.0), (1800, 1799, 0.5), (1800, 1799.9, 0.2), (2, 0.4, 0.8), (None, 9e9, 1.0)],
)
def test_it_looks_the_sooner_the_nearer_a_rank_is_to_its_limit(
    tmp_path: Path, limit_s: float | None, still_s: float, next_in_s: float
) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:  # it has no heartbeat, and so none since the job began
        request = WatchRequest(
            run_folder=str(tmp_path),
            start_timeout_s=limit_s,
            step_timeout_s=limit_s,
            uses_device=False,
            is_shown=False,
            pids=[(0, rank.pid)],
            world_size=1,
        )
        job = _WatchedRanks(request)
        job.check(job._began + still_s)
        rank.kill()
    assert job.next_check_s() == pytest.approx(next_in_s, abs=0.01)
