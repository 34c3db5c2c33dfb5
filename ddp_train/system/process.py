"""Processes: ties between them, so that none of ours outlives its parent; the kernel's facts about them (the only reader of /proc/PID)."""

import ctypes
import logging
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Ask a run to stop in good order. Batch systems send SIGUSR1 or SIGUSR2 some time before the end (`sbatch --signal=USR1@120`), a terminal
that is closed sends SIGHUP."""

NUM_THREADS = "OMP_NUM_THREADS"  # libraries read it when they are loaded; a forked rank sets its threads later (`rank/forked.py`)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_BLOCKS = (1 << 30, 32 << 20)  # bytes; an older glibc takes no more than the second
HAS_SHARED_MEMORY = hasattr(os, "memfd_create")  # a Python that was built for an old glibc has none
"""Whether there are files in memory: other processes find them by our pid, and they end with this process."""


def restrict_new_files() -> None:
    """Create files that others can neither read nor write, and the group not write, from now on; a stricter umask stays."""
    os.umask(os.umask(0o077) | 0o027)


def allow_open_files() -> int:
    """Raise this process's limit of open files (1,024 by default on most systems) to the user's; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS: the hard limit is more than its kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


@dataclass
class Child:
    """A process that this one has forked."""

    pid: int
    _exit_code: int | None = None

    def exit_code(self) -> int | None:
        """Return its exit code (negative: the signal) when it has ended; else None."""
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self) -> int:
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send it a signal. Signal handlers call this too: it never waits for the child, which the main thread may be doing."""
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(work: Callable[[], int]) -> Child:
    """Fork a process that runs `work`, exits with its return value and ends with this one.

    It has this process's modules, and no handlers for stop signals. This process should have no other thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # The child would run our handlers for a signal that comes before it has dropped them.
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            exit_with(lambda: _run_forked(work, parent))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)  # the parent may have blocked some until this process listens
    return Child(pid)


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Run `work`, and end this process at once with the exit code that it returns; after an exception, which is shown, with 1."""
    code = 1
    try:
        code = work()
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """End this process at once, from any thread, after flushing streams and logs.

    Nothing waits for the main thread, and neither the process group nor what C++ has is destroyed: gloo's threads, where they still run
    then, abort the process (one run in twenty with four ranks), and a run that is done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def die_with_parent(parent: int | None = None, *, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent is gone: a killed agent cannot tell its ranks, which would train for ever.

    `parent`: its pid where the caller knows it, as it may be gone already. `number`: the signal that ends this process; it may save first.
    """
    parent = parent or os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died between the two lines
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Cancel `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def wait_for_ends(pids: Iterable[int], *, within_s: float, others_within_s: float) -> None:
    """Wait until all these children have ended; after the first one's end, only `others_within_s` for the others.

    Children whose exit code was read already are left out.
    """
    deadline = time.monotonic() + within_s
    with suppress(OSError, AttributeError), ExitStack() as opened:  # a kernel or a Python without pidfd
        waiting = select.poll()
        running = set()
        for pid in pids:
            with suppress(ProcessLookupError):
                running.add(descriptor := os.pidfd_open(pid))
                opened.callback(os.close, descriptor)
                waiting.register(descriptor, select.POLLIN)
        while running and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in waiting.poll(1e3 * left_s):
                waiting.unregister(descriptor)
                running.remove(descriptor)
                deadline = min(deadline, time.monotonic() + others_within_s)
        return
    time.sleep(others_within_s)  # it cannot see an end: the caller looks for one


def set_subreaper(enabled: bool) -> None:
    """Let this process become the parent of descendants whose parent has ended, or not any more."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def keep_freed(environment: Mapping[str, str]) -> None:
    """Let freed memory stay with this process, for the next tensor of that size.

    By default glibc gives large blocks back to the kernel and asks for them again: a training step on a CPU then spends a tenth to a fifth
    of its time in page faults. Nothing happens where a user has set this already, or where the C library is another one.
    """
    if any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        if any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_BLOCKS):
            mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def close_all_but(*descriptors: int) -> None:
    """Close this process's other files. Only open numbers are visited: there may be a thousand million."""
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))).difference(descriptors):
        with suppress(OSError):  # the descriptor of the listing itself
            os.close(descriptor)


def num_threads() -> int:
    """Return how many threads this process has: where it is more than one, it should not be forked."""
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Return this process's resident memory in bytes, shared pages included."""
    return int(_read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def has_free_processor() -> bool:
    """Tell whether a process that this one starts now would have a processor to itself."""
    running = re.search(r" (\d+)/", _read("/proc/loadavg"))  # on the whole machine, this process too
    return len(os.sched_getaffinity(0)) > (int(running[1]) if running else 1)


def loaded_libraries() -> set[str]:
    """Return the paths of the shared libraries that this process has loaded."""
    paths = (line.split(maxsplit=5)[5:] for line in _read("/proc/self/maps").splitlines())
    return {path[0] for path in paths if path and ".so" in path[0]}


def state_of(pid: int) -> str:
    """Return the letter for a process's state (R, S, D: waits inside the kernel, T or t: stopped, Z: ended); "" when it is gone."""
    return _stat(pid)[0]


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def exit_code_of(pid: int) -> int | None:
    """Return the exit code (negative: the signal) of a zombie (ended, and its parent has not waited for it yet); else None."""
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[49])) if stat[0] in ("Z", "X") else None


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 when the process is gone."""
    return int(_stat(pid)[1] or 0)


def start_of(pid: int) -> str:
    """Return when a process began, so that a reused pid is not mistaken for it; "" when it is gone."""
    return _stat(pid)[19]  # in clock ticks since the machine started


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, of their children, and so on."""
    children = (int(child) for task in Path("/proc").glob(f"{pid}/task/*/children") for child in _read(task).split())
    return [below for child in children for below in (child, *descendants(child))]


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the open files of a process: a path that opens the same file here, and the file's name; nothing when it is gone."""
    with suppress(OSError):
        for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            with suppress(OSError):  # closed meanwhile
                yield (path := f"/proc/{pid}/fd/{number}"), os.readlink(path)


def file_in_memory(content: bytes) -> int:
    """Return the descriptor of a new unnamed file with this content."""
    if HAS_SHARED_MEMORY:
        descriptor = os.memfd_create("request")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return a path by which this user's other processes open a file of this process, while it has it open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_memory(pid: int, name: str) -> int | None:
    """Return a descriptor for reading another process's file in memory; None: it has none of that name, or has ended."""
    for path, file in open_files(pid):
        if file.startswith(f"/memfd:{name} "):
            with suppress(OSError):  # closed meanwhile
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def command_line(pid: int) -> str:
    """Return a process's command line; "": it cannot be read."""
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ")


def handles_signal(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal, which would otherwise end it."""
    handled = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return handled is not None and bool(int(handled[1], 16) >> (number - 1) & 1)


def pid_namespace() -> int:
    """Return the pid namespace's number, which differs between containers of one machine; 0: there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine; the machine's name where there is none."""
    return _read("/proc/sys/kernel/random/boot_id").strip() or os.uname().nodename


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, all empty when the process is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 50


def _read(path: str | Path) -> str:
    """Return the text of a kernel's file; "": it is empty, or has gone."""
    try:
        with open(path, errors="replace") as file:  # a third of the time that `Path` takes: it is read at every log step
            return file.read()
    except OSError:  # also when a process ends while we read
        return ""


def _run_forked(work: Callable[[], int], parent: int) -> int:
    """Run `work` in a forked process, which dies with its parent and has none of its signal handlers."""
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)  # an event loop's: the child would wake the parent's with its own signals
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return work()


def oom_kills() -> int | None:
    """Return how many processes of this machine's share (control group) the out-of-memory killer has ended; None: not counted."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            counter = f"/sys/fs/cgroup{path}/memory.events" if not controllers else f"/sys/fs/cgroup/memory{path}/memory.oom_control"
            if found := re.search(r"^oom_kill (\d+)$", _read(counter), re.MULTILINE):
                return int(found[1])
    return None


def ran_out(oom_kills_before: int | None) -> bool | None:
    """Tell whether the out-of-memory killer was at work since `oom_kills` was asked; None where the kernel does not count."""
    return None if oom_kills_before is None else (oom_kills() or 0) > oom_kills_before
