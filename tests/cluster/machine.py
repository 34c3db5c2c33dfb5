"""What the test beds are made of: the programs they need, and processes that cannot outlive the test.

A `Machine` is a set of Linux namespaces with an init of its own, which reads from a pipe of the test's process. When that process ends, in
whatever way, the pipe is closed, the init ends, and the kernel kills everything else in its PID namespace: daemons, ranks, what hangs.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Finished

PACKAGES = {
    "ip": "iproute2",
    "nft": "nftables",
    "faketime": "faketime",
    "slurmctld": "slurm-wlm",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
"""Program -> Debian's package of it."""
_INSTALL_WITHIN_S = 240
_SBIN = "/usr/sbin:/sbin"

_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # it is the parent of all who have lost theirs: the kernel buries them
print("ready", flush=True)
sys.stdin.buffer.read()  # to its end, which comes with the end of the test's process
"""


def need(*programs: str) -> None:
    """Install what is missing of the programs, once; skip the test where that cannot be done."""
    programs = ("unshare", "nsenter", *programs)
    missing = _missing(programs)
    if not missing:
        return
    packages = sorted({PACKAGES.get(program, "util-linux") for program in missing})
    yourself = f"needs {', '.join(missing)}: apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None or Path("/run/systemd/system").exists():
        pytest.skip(yourself)  # where systemd runs, a package would start its daemons for good
    with (Path(tempfile.gettempdir()) / "ddp_train_tests.apt").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of `make test`
        missing = _missing(programs)
        if missing and (problem := _install(packages)):
            pytest.skip(f"{yourself} ({problem})")


def need_root() -> None:
    """Skip the test without root: SLURM's and OpenSSH's daemons want more than a user namespace gives."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def _missing(programs: tuple[str, ...]) -> list[str]:
    return [program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:{_SBIN}") is None]


def _install(packages: list[str]) -> str:
    """Install packages and return what went wrong, if anything."""
    install = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", *packages]
    problem = ""
    for command in (install, ["apt-get", "update", "--quiet"], install):  # the lists of a fresh container are empty
        if command[1] == "update" and not problem:
            break
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_INSTALL_WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get took longer than {_INSTALL_WITHIN_S} s"
        problem = "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
    return problem


@dataclass(frozen=True)
class Running:
    """A command that runs on a machine."""

    popen: subprocess.Popen[bytes]
    record: Path  # what it prints goes to files beside this name

    @property
    def pid(self) -> int:
        """The program's own process, as it is counted outside of the machine."""
        inside = children(self.popen.pid)  # `nsenter` waits for the program, and passes no signal on
        assert len(inside) == 1, f"it has ended with {self.popen.poll()}:\n{self.output}"
        return inside[0]

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._printed("stdout") + self._printed("stderr")

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.popen.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the program alone, not to what it has started."""
        os.kill(self.pid, number)

    def finish(self, *, timeout: float = 120) -> Finished:
        """Wait for its end; kill it when it hangs."""
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout} s\n{self.output}")
        return Finished(code, self._printed("stdout"), self._printed("stderr"))

    def kill(self) -> None:
        """End the program as `kill -9` does."""
        for pid in children(self.popen.pid):
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def _printed(self, stream: str) -> str:
        return self.record.with_suffix(f".{stream}").read_text(errors="replace")


class Machine:
    """Namespaces and their init."""

    def __init__(self, folder: Path, *, unshare: tuple[str, ...] = (), within: Machine | None = None) -> None:
        """Start it.

        Args:
            folder: keeps what the commands print.
            unshare: what it has of its own beside its processes and mounts: `--net`, `--uts`.
            within: a machine whose user namespace it shares. Only without root each has one.
        """
        self.folder = folder
        self._user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        fresh_user = self._user and within is None
        self._init = subprocess.Popen(
            [
                *(["nsenter", f"--target={within.pid}", *self._user] if self._user and within is not None else []),
                *["unshare", *(["--user", "--map-root-user"] if fresh_user else []), *unshare, "--pid", "--fork", "--kill-child"],
                *["--mount-proc", sys.executable, "-ISc", _INIT],
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for pytest, which takes it down in good order
        )
        assert self._init.stdout is not None and self._init.stderr is not None
        is_up = select.select([self._init.stdout], [], [], 30)[0] and self._init.stdout.readline() == b"ready\n"
        if not is_up:
            self._init.kill()
            pytest.skip(f"needs root or user namespaces: {self._init.stderr.read().decode().strip()}")
        [self.pid] = children(self._init.pid)
        self._namespaces = [*self._user, "--pid", "--mount", *(kind for kind in unshare if kind in ("--net", "--uts"))]
        self._commands: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Running:
        """Start a command on it, with this process's environment, and do not wait."""
        record = self.folder / f"{self.pid}_{len(self._commands)}.out"
        enter = ["nsenter", f"--target={self.pid}", *self._namespaces, "--", "sh", "-c", 'cd "$0" && exec "$@"']
        with record.with_suffix(".stdout").open("wb") as stdout, record.with_suffix(".stderr").open("wb") as stderr:
            popen = subprocess.Popen(
                [*enter, str(cwd or self.folder), *command],
                env=_environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._commands.append(popen)
        return Running(popen, record)

    def run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 60) -> Finished:
        """Run a command on it to its end."""
        return self.start(*command, cwd=cwd, env=env).finish(timeout=timeout)

    def in_its_network(self, *command: str) -> None:
        """Run a command that sees its network and this machine's processes; it has to succeed."""
        enter = ["nsenter", f"--target={self.pid}", *self._user, "--net", "--", *command]
        done = subprocess.run(enter, env=_environment({}), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stderr}"

    def must(self, *command: str, timeout: float = 60) -> str:
        """Run a command that has to succeed, and return what it printed."""
        done = self.run(*command, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.output}"
        return done.stdout

    def processes(self) -> list[str]:
        """Return the command lines of what runs on it, without its init."""
        mine, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.name != str(self.pid) and os.readlink(process / "ns/pid") == mine:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
            except OSError:
                continue  # it has just ended
        return [line for line in found if line]  # one that has ended has none

    def end(self) -> None:
        """Kill everything on it."""
        assert self._init.stdin is not None and self._init.stdout is not None and self._init.stderr is not None
        for pid in children(self._init.pid):
            os.kill(pid, signal.SIGKILL)
        for process in (self._init, *self._commands):
            process.wait(30)
        for stream in (self._init.stdin, self._init.stdout, self._init.stderr):
            stream.close()


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ['PATH']}:{_SBIN}", "OMP_NUM_THREADS": "1", **env}


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def until(condition: Callable[[], bool], what: str, *, within_s: float = 20) -> None:
    """Wait until something is so, or fail with what was expected."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {within_s} s: {what}"
        time.sleep(0.05)
