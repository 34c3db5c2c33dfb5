"""What the kernel says of processes."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_train.system.process import (
    HAS_SHARED_MEMORY,
    allow_open_files,
    exit_code_of,
    fork,
    handles_signal,
    has_free_processor,
    is_alive,
    oom_kills,
    open_files,
    open_memory,
    parent_of,
    pid_namespace,
    start_of,
    wait_for_ends,
)


@pytest.fixture
def child() -> subprocess.Popen[str]:
    """Start a process that handles SIGUSR1 and ends when it is told to."""
    code = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_is_known_until_it_is_gone(child: subprocess.Popen[str]) -> None:
    assert is_alive(child.pid)
    assert parent_of(child.pid) == os.getpid()
    assert handles_signal(child.pid, signal.SIGUSR1)
    assert not handles_signal(child.pid, signal.SIGUSR2)
    assert int(start_of(child.pid)) >= int(start_of(os.getpid())) > 0
    assert pid_namespace() > 0
    child.communicate("\n")
    assert not is_alive(child.pid)
    assert (parent_of(child.pid), start_of(child.pid), list(open_files(child.pid))) == (0, "", [])
    assert not handles_signal(child.pid, signal.SIGUSR1)


def test_a_forked_process_gives_its_exit_code_and_takes_signals_until_it_has_ended() -> None:
    done, sleeping = fork(lambda: 3), fork(lambda: time.sleep(60) or 0)
    assert sleeping.exit_code() is None
    assert (done.wait(), done.exit_code()) == (3, 3)
    done.signal(signal.SIGKILL)  # nobody: the number may be somebody else's by now
    sleeping.signal(signal.SIGKILL)
    assert sleeping.wait() == -signal.SIGKILL


def test_an_open_file_is_found_by_its_name_and_can_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    with file.open("w") as stream:
        stream.write("here")
        stream.flush()
        file.unlink()
        (path,) = [path for path, name in open_files(os.getpid()) if name == f"{file} (deleted)"]
        assert path == f"/proc/{os.getpid()}/fd/{stream.fileno()}"
        assert Path(path).read_text() == "here"


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="needs Linux")
def test_a_file_in_memory_is_found_by_its_whole_name_until_it_is_closed() -> None:
    ours = os.memfd_create("numbers")
    os.write(ours, b"1 2 3")
    assert open_memory(os.getpid(), "number") is None
    found = open_memory(os.getpid(), "numbers")
    assert found is not None and os.read(found, 9) == b"1 2 3"
    for descriptor in (ours, found):
        os.close(descriptor)
    assert open_memory(os.getpid(), "numbers") is None


def test_the_kernels_count_is_read_in_both_versions_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/job\n0::/other\n",
        "/sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        "/sys/fs/cgroup/other/memory.events": "low 0\noom 2\noom_kill 5\noom_group_kill 0\n",
    }

    monkeypatch.setattr("ddp_train.system.process._read", lambda path: files.get(str(path), ""))
    assert oom_kills() == 3
    del files["/sys/fs/cgroup/memory/job/memory.oom_control"]
    assert oom_kills() == 5
    del files["/sys/fs/cgroup/other/memory.events"]
    assert oom_kills() is None


@pytest.mark.parametrize(("running", "processors", "is_free"), [(1, 1, False), (1, 2, True), (2, 2, False), (5, 2, False), (30, 64, True)])
def test_a_processor_is_free_where_fewer_run(monkeypatch: pytest.MonkeyPatch, running: int, processors: int, is_free: bool) -> None:
    monkeypatch.setattr("ddp_train.system.process._read", lambda path: f"12.30 0.20 0.10 {running}/345 6789\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert has_free_processor() is is_free


def test_children_are_waited_for_until_the_last_has_ended_and_no_longer_than_was_said() -> None:
    done, soon, sleeping = fork(lambda: 1), fork(lambda: time.sleep(0.2) or 0), fork(lambda: time.sleep(60) or 0)
    wait_for_ends([done.pid, soon.pid], within_s=60, others_within_s=60)
    assert exit_code_of(soon.pid) == 0 and exit_code_of(done.pid) == 1  # nobody has asked yet
    begun = time.monotonic()
    wait_for_ends([done.pid, sleeping.pid], within_s=60, others_within_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 30
    assert done.wait() == 1  # now somebody has
    begun = time.monotonic()
    wait_for_ends([done.pid, sleeping.pid], within_s=0.3, others_within_s=0.1)
    assert time.monotonic() - begun >= 0.3
    wait_for_ends([done.pid], within_s=60, others_within_s=60)
    assert time.monotonic() - begun < 30
    sleeping.signal(signal.SIGKILL)
    assert [each.wait() for each in (done, soon, sleeping)] == [1, 0, -signal.SIGKILL]


def test_a_process_may_have_as_many_open_files_as_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 524_288)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    assert allow_open_files() == 524_288 and limits[-1] == (524_288, 524_288)

    def refuse(which: int, new: tuple[int, int]) -> None:
        raise ValueError("not allowed")

    limits[:] = [(256, 10_240)]
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_open_files() == 256


PROGRAM = """
import os, resource
import torch
from ddp_train.system.process import keep_freed

keep_freed(os.environ)
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(6)]
    del kept
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[10:]))
"""


def faults(**environment: str) -> int:
    """Return how many pages ten steps of 24 MiB asked for."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_a_step_takes_again_what_the_step_before_has_freed() -> None:
    assert faults() < 100  # of 60,000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
@pytest.mark.parametrize("own", [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}], ids=str)
def test_who_has_set_it_is_left_alone(own: dict[str, str]) -> None:
    assert faults(**own) > 10_000
