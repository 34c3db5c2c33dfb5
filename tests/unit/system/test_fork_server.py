"""Processes that wait with everything imported, and become children of the one that asks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from ddp_train.system.deadline import wait_until
from ddp_train.system.fork_server import ForkRequest, ForkServer, fork_as_server, spawn_fork_server
from ddp_train.system.process import fork, is_alive, parent_of

SPAWNED = """
import sys, time
from dataclasses import dataclass
from ddp_train.system.fork_server import ForkRequest, run_fork_server, spawn_fork_server
@dataclass(frozen=True, kw_only=True)
class Exit(ForkRequest):
    code: int
if sys.argv[1:2] != ["owns"]:
    sys.exit(run_fork_server(lambda request: request.code + 10 * ("late" in sys.modules), sys.argv[1:]))
import os
server = spawn_fork_server(os.environ, sys.argv[3:], command=[sys.executable, "-u", __file__])
print(server._waiting.pid, flush=True)
if sys.argv[2] == "sleeps":
    time.sleep(60)
if sys.argv[2] == "early":
    print(server.start(Exit(code=3, imports=["early"])).wait(), flush=True)
    if not server.wait_until_ready():
        sys.exit("nothing follows")
child = server.start(Exit(code=4, imports=sys.argv[3:], is_last=True))
open("go_on", "w").close()
print(child.wait(), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Exit(ForkRequest):
    code: int = 0
    signal: int = 0
    text: str = ""


def entry(request: Exit) -> int:
    for number in request.files:
        os.write(number, b"it is here")
    os.kill(os.getpid(), request.signal)
    return request.code


@pytest.fixture
def server() -> Iterator[ForkServer]:
    found = fork_as_server(entry)
    yield found
    found.end()


def test_each_is_a_child_of_who_asks_in_a_session_of_its_own_and_ends_with_its_own_code(server: ForkServer) -> None:
    for code in (3, 0, 5):
        assert server.wait_until_ready()
        waiting = server._waiting
        assert waiting is not None and parent_of(waiting.pid) == os.getpid()
        child = server.start(Exit(code=code))
        assert child is waiting and child.wait() == code
    assert server.wait_until_ready()
    child = server.start(Exit(signal=signal.SIGSEGV))
    assert child.wait() == -signal.SIGSEGV


def test_files_keep_their_numbers(server: ForkServer) -> None:
    reading, writing = os.pipe()
    assert server.start(Exit(files=[writing])).wait() == 0
    os.close(writing)
    assert os.read(reading, 100) == b"it is here"
    os.close(reading)


def test_a_request_of_any_length_is_taken_at_once_by_one_that_imports_still() -> None:
    reading, writing = os.pipe()
    request_socket, theirs = socket.socketpair()
    child = fork(lambda: len(os.read(reading, 1)))  # as one that imports: it reads nothing of the line
    server = ForkServer(child, request_socket, is_loaded=False)
    assert server.wait_until_ready()
    server.start(Exit(text="x" * 5_000_000, is_last=True))
    os.write(writing, b"!")
    child.wait()
    for each in (reading, writing, theirs.detach()):
        os.close(each)


def test_what_has_threads_becomes_what_is_asked_for_and_leaves_no_clone() -> None:
    def with_threads(request: ForkRequest) -> int:
        return 0

    with mock.patch("ddp_train.system.fork_server.num_threads", return_value=2):
        server = fork_as_server(with_threads)
    assert server.wait_until_ready() and server.start(ForkRequest()).wait() == 0
    assert not server.wait_until_ready()
    server.end()


def test_a_fork_closes_what_is_its_owners_alone() -> None:
    reading, writing = os.pipe()
    server = fork_as_server(entry, without=[writing])
    os.close(writing)
    assert os.read(reading, 1) == b""  # while it waits
    os.close(reading)
    server.end()


def test_one_that_was_killed_is_not_there_any_more(server: ForkServer) -> None:
    assert server._waiting is not None
    os.kill(server._waiting.pid, signal.SIGKILL)
    assert wait_until(lambda: not server.wait_until_ready(), within_s=10, every_s=0.01)


def spawned(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a process that owns a fork server, which imports the modules `early` and `late` of a folder, or one that is `broken`."""
    (folder / "program.py").write_text(SPAWNED)
    (folder / "early.py").write_text("")
    (folder / "late.py").write_text("import os, time\nwhile not os.path.exists('go_on'): time.sleep(0.01)\n")
    (folder / "broken.py").write_text("raise KeyError('half done')\n")
    command = [sys.executable, "program.py", "owns", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (["asks"], ["4"]),
        (["asks", "early", "late"], ["14"]),  # whether or not it was imported when it was asked
        (["early", "early", "late"], ["3", "14"]),  # what is asked early need not wait for all imports, and what follows it has them
        (["asks", "early"], ["4"]),  # what nobody needs is not imported
    ],
)
def test_a_fresh_interpreter_has_what_a_request_needs(tmp_path: Path, words: list[str], codes: list[str]) -> None:
    stdout, stderr = spawned(tmp_path, *words).communicate(timeout=60)
    assert stdout.split()[1:] == codes, stderr


def test_an_import_that_fails_is_told_when_it_is_needed(tmp_path: Path) -> None:
    stdout, stderr = spawned(tmp_path, "asks", "broken").communicate(timeout=60)
    assert stdout.split()[1] == "1" and "half done" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_it_at_once_and_without_a_word(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    server = spawn_fork_server(os.environ, ["waits"], command=[sys.executable, str(program)])
    assert server._waiting is not None
    server._waiting.signal(number)  # Python has not begun
    assert server._waiting.wait() == -number
    server.end()


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    with spawned(tmp_path, "sleeps") as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    assert wait_until(lambda: not is_alive(pid), within_s=10, every_s=0.01)
