"""One run per folder: who has it, and when it is free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.system import folder_lock
from ddp_train.system.process import is_alive
from tests.conftest import wait_for


@pytest.fixture(autouse=True)
def unlock_all() -> Iterator[None]:
    yield
    folder_lock.unlock_all()


def holder(folder: Path, *, before: str = "", after: str = "input()") -> subprocess.Popen[str]:
    lines = ["import os, pathlib, sys, ddp_train.system.folder_lock as lock", before, f"lock.lock(pathlib.Path({str(folder)!r}), key='k')"]
    code = "\n".join([*lines, "print('held', flush=True)", after])
    started = subprocess.Popen([sys.executable, "-c", code, "some", "job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "held\n"
    return started


def elsewhere(folder: Path, *, seconds_ago: float) -> None:
    """Write what a run on another machine has left."""
    file = folder / folder_lock.HOLDER
    file.write_text(json.dumps({"host": "node7", "pid": 42, "command": "ddp-train", "started": "2026-01-01 00:00:00", "boot": "another"}))
    os.utime(file, (file.stat().st_mtime - seconds_ago,) * 2)


def test_the_second_is_told_who_the_first_is_and_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    first = holder(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run is working in .*pid {first.pid} on {os.uname().nodename}, started 20.*some job"):
        folder_lock.lock(tmp_path, key="resume")
    assert folder_lock.is_locked(tmp_path)
    first.kill()
    first.communicate()
    assert not folder_lock.is_locked(tmp_path)
    folder_lock.lock(tmp_path, key="resume")
    assert json.loads((tmp_path / folder_lock.HOLDER).read_text())["pid"] == os.getpid()
    folder_lock.unlock_all()
    assert not any(tmp_path.iterdir())


def test_a_machine_that_the_lock_does_not_reach_is_refused_while_the_lease_is_fresh(tmp_path: Path) -> None:
    elsewhere(tmp_path, seconds_ago=0)
    with pytest.raises(ConfigError, match=r"pid 42 on node7[\s\S]*30 s when that machine is gone"):
        folder_lock.lock(tmp_path, key="resume")
    elsewhere(tmp_path, seconds_ago=2 * folder_lock.REFRESH_S)
    assert folder_lock.is_locked(tmp_path)
    elsewhere(tmp_path, seconds_ago=4 * folder_lock.REFRESH_S)
    folder_lock.lock(tmp_path, key="resume")


def test_looking_who_holds_a_folder_never_makes_a_start_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "is_shared", lambda folder: False)
    starts_are_over = threading.Event()

    def look() -> set[bool]:
        found = set()
        while not starts_are_over.is_set():
            found.add(folder_lock.is_locked(tmp_path))
        return found

    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(look)
        try:
            for _ in range(400):
                folder_lock.lock(tmp_path, key="k")
                folder_lock.unlock_all()
        finally:
            starts_are_over.set()
    assert looks.result()


def test_a_lease_is_refreshed_where_other_machines_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "is_shared", lambda folder: True)
    monkeypatch.setattr(folder_lock, "REFRESH_S", 0.05)
    tasks = set(os.listdir("/proc/self/task"))
    folder_lock.lock(tmp_path, key="k")
    assert set(os.listdir("/proc/self/task")) <= tasks  # a thread would be alive when an agent is forked
    file = tmp_path / folder_lock.HOLDER
    os.utime(file, (0, 0))
    wait_for(lambda: file.stat().st_mtime > 0)
    folder_lock.unlock_all()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "agent",
    ["os.fork() or", "import subprocess; subprocess.Popen([sys.executable, '-c', 'input()'], pass_fds=lock.descriptors(), stderr=-3) and"],
    ids=["forked", "started with descriptors"],
)
def test_lock_and_lease_last_as_long_as_an_agent_of_a_killed_holder(tmp_path: Path, agent: str) -> None:
    shared = "lock.is_shared = lambda folder: True"
    first = holder(tmp_path, before=shared, after=f"{agent} print(lock._locked[0].lease.pid, flush=True); sys.stdin.read()")
    assert first.stdin is not None and first.stdout is not None
    lease = int(first.stdout.readline())
    first.kill()
    first.wait()
    time.sleep(0.1)
    assert is_alive(lease)
    assert folder_lock.is_locked(tmp_path)
    first.stdin.close()
    wait_for(lambda: not is_alive(lease) and not folder_lock.is_locked(tmp_path))
    first.stdout.close()


def test_without_locks_a_live_process_of_this_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    first = holder(tmp_path)
    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=f"pid {first.pid}"):
        folder_lock.lock(tmp_path, key="k")
    first.kill()
    first.communicate()
    folder_lock.lock(tmp_path, key="k")
