"""The far end of a line obeys its client, and its node program outlives neither."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_train.launch.engine import ssh_remote
from ddp_train.launch.engine.ssh_remote import READY
from tests.conftest import our_processes, wait_for

NODE = f"""#!{sys.executable}
import os, signal, sys, time

def end(word, code):
    os.write(1, word)  # not print, which may be at work
    os._exit(code)

signal.signal(signal.SIGHUP, lambda number, frame: end(b"saved\\n", 0))
signal.signal(signal.SIGINT, lambda number, frame: end(b"interrupted\\n", 3))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP, signal.SIGINT])  # they are held back until it listens
print("node", *sys.argv[1:], flush=True)
while True:
    time.sleep(0.05)
"""
REMOTE = """
import sys
from ddp_train.launch.engine import ssh_remote
sys.executable, ssh_remote.SILENT_S = sys.argv[1], float(sys.argv[2])
sys.exit(ssh_remote.main(["spec.json", "2"]))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a far end whose node program is a script, in a folder of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(silent_s: float = 15) -> subprocess.Popen[str]:
        node = tmp_path / "node"
        node.write_text(NODE)
        node.chmod(0o755)
        command = [sys.executable, "-c", REMOTE, str(node), str(silent_s)]
        root = str(Path(ssh_remote.__file__).parents[3])
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1, env={"PYTHONPATH": root}
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == f"{READY}\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("alive\ngo 3f2a\n")
    assert process.stdout.readline() == "node -m ddp_train node spec.json --index=2 --launch=3f2a\n"


def test_a_signal_is_passed_on_and_the_exit_code_comes_back(start: Start) -> None:
    process = start()
    begin(process)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("signal 2\n")
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(20) == 3
    process.communicate()


def test_the_end_of_the_line_lets_the_run_save(start: Start) -> None:
    process = start()
    begin(process)
    assert process.communicate()[0] == "saved\n"
    assert process.returncode == 0


def test_a_line_that_nobody_reads_any_more_keeps_nobody_from_saving(start: Start, tmp_path: Path) -> None:
    process = start()
    begin(process)
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    for stream in (process.stdout, process.stderr, process.stdin):
        stream.close()
    assert process.wait(20) == 0


def test_a_silent_line_is_broken(start: Start) -> None:
    process = start(silent_s=0.5)
    begin(process)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    assert process.wait(20) == 0
    process.communicate()


def test_without_a_word_nothing_begins(start: Start) -> None:
    process = start()
    assert process.communicate()[0] == ""
    assert process.returncode == 0


def test_a_far_end_that_is_killed_leaves_no_node_program(start: Start, tmp_path: Path) -> None:
    process = start()
    begin(process)
    process.kill()
    process.communicate()
    wait_for(lambda: not [line for line in our_processes(tmp_path) if "node" in line])


def test_a_machine_whose_environment_lacks_a_package_says_so_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssh_remote, "_NEEDED", ("torch", "no_such_package"))
    assert ssh_remote.main(["spec.json", "2"]) == 78
    said = capsys.readouterr()
    assert said.err == f"{sys.executable} has no no_such_package\n" and READY not in said.out
