"""Python stacks of a stuck process, a line about its work, and whether Python still runs in it: other processes ask for them.

faulthandler writes the stacks from a signal handler, in C: also while a thread holds the interpreter's lock for ever, and in
a deadlock. A process that is stopped or waits inside the kernel cannot answer.
"""

import faulthandler
import os
import re
import signal
from collections.abc import Iterable
from traceback import FrameSummary

from ddp_train.system.deadline import wait_until
from ddp_train.system.process import HAS_SHARED_MEMORY, handles_signal, open_memory

_SIGNAL = signal.SIGRTMIN + 9
_SIGNAL_TO_PYTHON = _SIGNAL + 1
_STACKS, _NOTE, _ANSWERS = "ddp_train_stacks", "ddp_train_note", "ddp_train_answers"
_NOTE_BYTES = 200
_POLL_S = 0.05
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def dump_on_request() -> None:
    """Let other processes ask for this process's stacks, and whether its main thread runs Python. Called once, in that thread."""
    if HAS_SHARED_MEMORY:
        faulthandler.register(_SIGNAL, file=os.memfd_create(_STACKS), all_threads=True)
        answers = os.memfd_create(_ANSWERS)
        signal.signal(_SIGNAL_TO_PYTHON, lambda number, frame: os.write(answers, b"."))


class Note:
    """What this process is doing, for others to read; about a microsecond each time."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NOTE) if HAS_SHARED_MEMORY else None

    def write(self, text: str) -> None:
        """Replace the note; it may have 200 bytes."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def note_of(pid: int) -> str:
    """Return the note of a process; "": it has none."""
    if (descriptor := open_memory(pid, _NOTE)) is None:
        return ""
    with open(descriptor, "rb") as file:
        return file.read().decode(errors="replace").strip()


def ask(pids: Iterable[int], *, within_s: float = 1.0) -> dict[int, str]:
    """Return the stacks of all threads as faulthandler writes them, by pid; processes that cannot answer are left out."""
    return {pid: text for pid, text in _answers(pids, _SIGNAL, _STACKS, within_s).items() if text}


def in_native_code(pids: Iterable[int], *, within_s: float = 0.5) -> set[int]:
    """Return the processes whose main thread is inside native code that does not return: a kernel launch, a read of a GPU, a collective.

    Python runs its signal handlers between bytecodes, and where it waits itself: for a lock, a socket, the end of a sleep. Processes that
    cannot answer are left out.
    """
    return {pid for pid, text in _answers(pids, _SIGNAL_TO_PYTHON, _ANSWERS, within_s).items() if not text}


def _answers(pids: Iterable[int], number: int, name: str, within_s: float) -> dict[int, str]:
    """Send a signal to the processes that handle it, and return what each one writes into its file; "": nothing."""
    files, sizes = {}, {}
    for pid in pids:
        if handles_signal(pid, number) and (descriptor := open_memory(pid, name)) is not None:
            files[pid], sizes[pid] = descriptor, [os.fstat(descriptor).st_size]
            os.kill(pid, number)

    def are_written() -> bool:
        for pid, descriptor in files.items():
            sizes[pid].append(os.fstat(descriptor).st_size)
        return all(len(seen) > 2 and seen[0] < seen[-1] == seen[-2] for seen in sizes.values())

    wait_until(are_written, within_s=within_s, every_s=_POLL_S)
    texts = {}
    for pid, descriptor in files.items():
        start, end = sizes[pid][0], os.fstat(descriptor).st_size
        texts[pid] = os.pread(descriptor, end - start, start).decode(errors="replace")
        os.close(descriptor)
    return texts


def main_thread(text: str) -> list[FrameSummary]:
    """Return the frames of the main thread, outermost first."""
    _, *threads = _THREAD.split(text)
    if not threads:
        return []
    # The kernel gives a signal to the main thread unless that blocks it; and faulthandler writes the oldest thread last.
    chosen = next((thread for thread in threads if thread.startswith("Current")), threads[-1])
    return [FrameSummary(file, int(line), name) for file, line, name in reversed(_FRAME.findall(chosen))]
