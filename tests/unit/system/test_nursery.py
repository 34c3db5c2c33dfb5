"""Processes that wait with everything imported, and become children of the one that asks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ddp_train.system.deadline import wait_until
from ddp_train.system.nursery import Nursery, fork_nursery, spawn_nursery
from ddp_train.system.process import fork, is_alive, parent_of

SPAWNED = """
import sys, time
from ddp_train.system.nursery import spawn_nursery, wait_in_nursery
def load():
    yield "torch"
    if "broken" in sys.argv: raise ImportError("no torch")
if sys.argv[1] == "waits":
    sys.exit(wait_in_nursery(load, lambda request: request["code"]))
import os
nursery = spawn_nursery([sys.executable, __file__, "waits", *sys.argv[2:]], os.environ)
print(nursery._waiting.pid, flush=True)
if "asks" in sys.argv:
    print(nursery.start({"code": 7}, is_last=True).wait(), flush=True)
else:
    time.sleep(60)
"""


def become(request: dict[str, Any]) -> int:
    for number in request["files"]:
        os.write(number, b"it is here")
    os.kill(os.getpid(), request.get("signal", 0))
    return int(request["code"])


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    found = fork_nursery(become)
    yield found
    found.end()


def test_each_is_a_child_of_who_asks_in_a_session_of_its_own_and_ends_with_its_own_code(nursery: Nursery) -> None:
    for code in (3, 0, 5):
        assert nursery.is_there()
        waiting = nursery._waiting
        assert waiting is not None and parent_of(waiting.pid) == os.getpid()
        child = nursery.start({"code": code})
        assert child is waiting and child.wait() == code
    assert nursery.is_there()
    child = nursery.start({"code": 0, "signal": signal.SIGSEGV})
    assert child.wait() == -signal.SIGSEGV


def test_files_keep_their_numbers(nursery: Nursery) -> None:
    reading, writing = os.pipe()
    assert nursery.is_there()
    assert nursery.start({"code": 0}, files=[writing]).wait() == 0
    os.close(writing)
    assert os.read(reading, 100) == b"it is here"
    os.close(reading)


def test_a_request_of_any_length_is_taken_at_once_by_one_that_imports_still() -> None:
    reading, writing = os.pipe()
    door, theirs = socket.socketpair()
    child = fork(lambda: len(os.read(reading, 1)))  # as one that imports: it reads nothing of the line
    nursery = Nursery(child, door, is_loaded=False)
    assert nursery.is_there()
    nursery.start({"code": 0, "environment": {"LONG": "x" * 5_000_000}}, is_last=True)
    os.write(writing, b"!")
    child.wait()
    for each in (reading, writing, theirs.detach()):
        os.close(each)


def test_what_has_threads_becomes_what_is_asked_for_and_leaves_no_clone() -> None:
    def become_with_threads(request: dict[str, Any]) -> int:
        return 0

    with mock.patch("ddp_train.system.nursery.num_threads", return_value=2):
        nursery = fork_nursery(become_with_threads)
    assert nursery.is_there() and nursery.start({}).wait() == 0
    assert not nursery.is_there()
    nursery.end()


def test_a_fork_closes_what_is_its_owners_alone() -> None:
    reading, writing = os.pipe()
    nursery = fork_nursery(become, without=[writing])
    os.close(writing)
    assert os.read(reading, 1) == b""  # while it waits
    os.close(reading)
    nursery.end()


def test_one_that_was_killed_is_not_there_any_more(nursery: Nursery) -> None:
    assert nursery._waiting is not None
    os.kill(nursery._waiting.pid, signal.SIGKILL)
    assert wait_until(lambda: not nursery.is_there(), within_s=10, every_s=0.01)


def spawned(folder: Path, *words: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(SPAWNED)
    return subprocess.Popen([sys.executable, str(program), "owns", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_fresh_interpreter_becomes_what_is_asked_for(tmp_path: Path) -> None:
    stdout, stderr = spawned(tmp_path, "asks").communicate(timeout=60)
    assert stdout.split()[1] == "7", stderr


def test_an_import_that_fails_is_told_when_it_is_needed(tmp_path: Path) -> None:
    stdout, stderr = spawned(tmp_path, "asks", "broken").communicate(timeout=60)
    assert stdout.split()[1] == "1" and "no torch" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_it_at_once_and_without_a_word(tmp_path: Path, number: signal.Signals) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    nursery = spawn_nursery([sys.executable, str(program), "waits"], os.environ)
    assert nursery._waiting is not None
    nursery._waiting.signal(number)  # Python has not begun
    assert nursery._waiting.wait() == -number
    nursery.end()


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    with spawned(tmp_path) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    assert wait_until(lambda: not is_alive(pid), within_s=10, every_s=0.01)


EARLY = """
import os, sys, time
from ddp_train.system.nursery import spawn_nursery, wait_in_nursery
def load():
    yield "torch"
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    sys.loaded = True
if sys.argv[1] == "waits":
    sys.exit(wait_in_nursery(load, lambda request: request["code"] + 10 * hasattr(sys, "loaded")))
nursery = spawn_nursery([sys.executable, __file__, "waits", sys.argv[2]], os.environ)
if "early" in sys.argv:
    print(nursery.start({"code": 3}, needs="torch").wait(), flush=True)
if not nursery.is_there():
    sys.exit("nothing follows")
child = nursery.start({"code": 4}, is_last=True)
open(sys.argv[2], "w").close()
print(child.wait(), flush=True)
"""


@pytest.mark.parametrize(("words", "codes"), [(["early"], ["3", "14"]), ([], ["14"])])
def test_what_is_asked_early_need_not_wait_for_all_imports_and_what_follows_it_has_them(
    tmp_path: Path, words: list[str], codes: list[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(EARLY)
    asks = [sys.executable, str(program), "owns", str(tmp_path / "go_on"), *words]
    done = subprocess.run(asks, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == codes, done.stderr


PAUSING = """
import os, sys, time
from ddp_train.system.nursery import spawn_nursery, wait_in_nursery
at, asked = sys.argv[2:]
def load():
    time.sleep(2)
    open(at, "w").close()
    yield "torch"
    sys.loaded = True
    while not os.path.exists(asked):
        time.sleep(0.01)
if sys.argv[1] == "waits":
    sys.exit(wait_in_nursery(load, lambda request: request["code"] + 10 * hasattr(sys, "loaded"), pauses_at="torch"))
nursery = spawn_nursery([sys.executable, __file__, "waits", at, asked], os.environ)
while not os.path.exists(at):
    time.sleep(0.01)
time.sleep(0.2)
child = nursery.start({"code": 3}, is_last=True, needs="torch")
open(asked, "w").close()
print(child.wait(), flush=True)
"""


def test_what_not_all_need_is_imported_only_when_nobody_has_asked_for_less(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PAUSING)
    asks = [sys.executable, str(program), "owns", str(tmp_path / "at"), str(tmp_path / "asked")]
    done = subprocess.run(asks, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["3"], done.stderr
