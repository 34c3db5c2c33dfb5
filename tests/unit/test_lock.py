"""One run per folder: who has it, and when it is free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_train import lock
from ddp_train.errors import ConfigError


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    yield
    lock.release()


def holder(folder: Path) -> subprocess.Popen[str]:
    code = f"import pathlib, ddp_train.lock as lock\nlock.hold(pathlib.Path({str(folder)!r}), key='k'); print('held', flush=True); input()"
    started = subprocess.Popen([sys.executable, "-c", code, "some", "job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "held\n"
    return started


def elsewhere(folder: Path, *, seconds_ago: float) -> None:
    """Write what a run on another machine has left."""
    file = folder / lock.HOLDER
    file.write_text(json.dumps({"host": "node7", "pid": 42, "command": "ddp-train", "started": "2026-01-01 00:00:00", "boot": "another"}))
    os.utime(file, (file.stat().st_mtime - seconds_ago,) * 2)


def test_the_second_is_told_who_the_first_is_and_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    first = holder(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run is working in .*pid {first.pid} on {os.uname().nodename}, started 20.*some job"):
        lock.hold(tmp_path, key="resume")
    assert lock.is_held(tmp_path)
    first.kill()
    first.communicate()
    assert not lock.is_held(tmp_path)
    lock.hold(tmp_path, key="resume")
    assert json.loads((tmp_path / lock.HOLDER).read_text())["pid"] == os.getpid()
    lock.release()
    assert not any(tmp_path.iterdir())


def test_a_machine_that_the_lock_does_not_reach_is_refused_while_the_lease_is_fresh(tmp_path: Path) -> None:
    elsewhere(tmp_path, seconds_ago=0)
    with pytest.raises(ConfigError, match=r"pid 42 on node7[\s\S]*30 s when that machine is gone"):
        lock.hold(tmp_path, key="resume")
    elsewhere(tmp_path, seconds_ago=2 * lock.REFRESH_S)
    assert lock.is_held(tmp_path)
    elsewhere(tmp_path, seconds_ago=4 * lock.REFRESH_S)
    lock.hold(tmp_path, key="resume")


def test_a_lease_is_refreshed_where_other_machines_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_is_shared", lambda folder: True)
    monkeypatch.setattr(lock, "REFRESH_S", 0.05)
    lock.hold(tmp_path, key="k")
    file = tmp_path / lock.HOLDER
    os.utime(file, (0, 0))
    for _ in range(200):
        if file.stat().st_mtime > 0:
            break
        lock.time.sleep(0.02)
    assert file.stat().st_mtime > 0


def test_without_locks_a_live_process_of_this_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    first = holder(tmp_path)
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=f"pid {first.pid}"):
        lock.hold(tmp_path, key="k")
    first.kill()
    first.communicate()
    lock.hold(tmp_path, key="k")
