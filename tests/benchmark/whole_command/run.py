"""Start one command as at a prompt, watch its processes, and read what the probes in its ranks noted."""

from __future__ import annotations

import ctypes
import os
import pty
import resource
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_train.system.process import descendants

SCRIPTS = Path(__file__).parent / "scripts"
_HEADER, _ROW = struct.Struct("<3d"), struct.Struct("<2d")
_SAMPLE_EVERY_S = 0.25
_TIMEOUT_S = 160
_ORPHANS_END_IN_S = 10
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Stamps:
    """What the probe of one process noted; times in seconds since 1970."""

    pid: int
    first_forward: float
    threads: int
    steps: Sequence[tuple[float, float]]  # time and CPU time of the process when the forward after each step began


@dataclass(frozen=True)
class Command:
    """A command and the rows that its probes may need."""

    words: Sequence[str]
    steps: int
    threads: int  # of each rank, as OMP_NUM_THREADS


@dataclass(frozen=True)
class Ran:
    """A command that has ended well."""

    started: float
    ended: float
    cpu_s: float  # of all its processes
    ranks: Sequence[Stamps]
    memory_mib: Mapping[int, float]  # largest resident set of each process of the command, by pid


Watch = Callable[[Path], None]
"""What is done while a command runs, given the folder of its probes."""


@dataclass(frozen=True)
class Live:
    """A command that runs, with its ranks and whatever else it has started."""

    process: subprocess.Popen[bytes]
    probes: Path
    started: float
    shown: bytearray  # what it has said so far

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        _signal([self.process.pid, *descendants(self.process.pid)], number)

    @property
    def said(self) -> str:
        return self.shown.decode(errors="replace")[-4000:]


@contextmanager
def start(command: Command) -> Iterator[Live]:
    """Start a command in an empty folder, at a terminal of its own. What still runs of it at the end is killed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        probes, standing = Path(folder) / "probes", Path(folder) / "folder"
        probes.mkdir()
        standing.mkdir()
        environment = {
            **os.environ,
            "PROBE": str(probes),
            "PROBE_STEPS": str(command.steps),
            "PYTHONPATH": str(SCRIPTS),
            "OMP_NUM_THREADS": str(command.threads),
            "TERM": "xterm",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # whoever has installed a package has it compiled
        terminal, its_end = pty.openpty()
        shown = bytearray()
        reader = threading.Thread(target=_read, args=(terminal, shown))
        started = time.time()
        process = subprocess.Popen(
            command.words, cwd=standing, env=environment, stdin=subprocess.DEVNULL, stdout=its_end, stderr=its_end, start_new_session=True
        )
        os.close(its_end)
        reader.start()
        live = Live(process, probes, started, shown)
        try:
            yield live
        finally:
            if process.poll() is None:
                live.signal(signal.SIGKILL)
                process.wait()
            reader.join()
            os.close(terminal)


def run(command: Command, watch: Watch | None = None) -> Ran:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed, or has not ended in time; with the end of what it said.
    """
    cpu_s = _cpu_s_of_children()
    with start(command) as live:
        process = live.process
        ended: list[float] = []
        waiter = threading.Thread(target=lambda: (process.wait(), ended.append(time.time())))
        watcher = threading.Thread(target=watch, args=(live.probes,)) if watch else None
        for thread in (waiter, *([watcher] if watcher else [])):
            thread.start()
        memory_mib: dict[int, float] = {}
        try:
            while waiter.is_alive() and time.time() < live.started + _TIMEOUT_S:
                _sample(process.pid, memory_mib)
                waiter.join(_SAMPLE_EVERY_S)
        finally:
            if not (in_time := not waiter.is_alive()):
                live.signal(signal.SIGKILL)
            waiter.join()
            left = wait_for_orphans()
            if watcher:
                watcher.join()
        if process.returncode != 0 or not in_time or left:
            how = f"ended with {process.returncode}" if in_time else f"had not ended after {_TIMEOUT_S} s"
            how += f", and left {len(left)} processes behind" if left else ""
            raise RuntimeError(f"{' '.join(command.words)}\n{how}\n{live.said}")
        return Ran(live.started, ended[0], _cpu_s_of_children() - cpu_s, stamps_in(live.probes), memory_mib)


def stamps_in(probes: Path) -> list[Stamps]:
    """Return what the probes have noted so far, of the processes that have taken a step."""
    found = []
    for path in probes.iterdir():
        content = path.read_bytes()
        if len(content) < _HEADER.size:
            continue  # it is being made
        count, first_forward, threads = _HEADER.unpack_from(content)
        rows = [_ROW.unpack_from(content, _HEADER.size + _ROW.size * number) for number in range(int(count))]
        if rows:
            found.append(Stamps(int(path.name), first_forward, int(threads), [(row[0], row[1]) for row in rows]))
    return found


def _read(terminal: int, shown: bytearray) -> None:
    """Take what the command says until nobody can say more."""
    with suppress(OSError):  # the last one that held the other end has closed it
        while chunk := os.read(terminal, 65536):
            shown += chunk


def _sample(pid: int, memory_mib: dict[int, float]) -> None:
    """Note the largest resident set so far of each process of the command."""
    for each in (pid, *descendants(pid)):
        with suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    memory_mib[each] = int(line.split()[1]) / 1024


def adopt_orphans() -> None:
    """Become the parent of processes whose own is gone, so that what a command leaves behind is seen and counted. Once, before `run`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_orphans() -> list[int]:
    """Wait for the processes that the command has left behind; kill and return those that do not end by themselves."""
    deadline, killed = time.monotonic() + _ORPHANS_END_IN_S, []
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if time.monotonic() > deadline and not killed:
                killed = descendants(os.getpid())
                _signal(killed, signal.SIGKILL)
            time.sleep(0.01)
    return killed


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _signal(pids: Iterable[int], number: int) -> None:
    for each in pids:
        with suppress(ProcessLookupError):
            os.kill(each, number)
