"""Python stacks: those of a stuck process, a line about its work, and whether Python still runs in it, for which other processes ask.

faulthandler writes the stacks from a signal handler, in C: also while a thread holds the interpreter's lock for ever, and in
a deadlock. A process that is stopped or waits inside the kernel cannot answer. And stacks in words: what their process is doing.
"""

import faulthandler
import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary

from ddp_train import FOLDER
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import HAS_SHARED_MEMORY, handles_signal, open_memory

_SIGNAL = signal.SIGRTMIN + 9
_SIGNAL_TO_PYTHON = _SIGNAL + 1
_STACKS, _NOTE, _ANSWERS = "ddp_train_stacks", "ddp_train_note", "ddp_train_answers"
_NOTE_BYTES = 200
_POLL_S = 0.05
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
FILES_THAT_WAIT = ("ddp_train/distributed/", "ddp_train/rank/stop.py", "ddp_train/rank/peers.py")
"""Parts of the paths of our files in which a rank waits for other ranks: what they were called for is of interest."""
_ACTIVITIES = {  # part of the path of a library's innermost file -> the activity
    "torch/autograd/": "in backward",
    "multiprocessing/connection.py": "waiting for data",
    "torch/distributed/": "in a collective",
    "torch/nn/modules/": "in forward",
    "torch/optim/": "in the optimizer's step",
}


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


def describe_stack(frames: Sequence[FrameSummary]) -> str:
    """Describe a stack in one line: the activity, and the innermost line that is not a library's."""
    activity = next((name for frame in reversed(frames) for path, name in _ACTIVITIES.items() if path in frame.filename), "")
    innermost = next((frame for frame in reversed(frames) if _is_users_or_ours(frame)), None)
    where = f"{Path(innermost.filename).name}:{innermost.lineno} in {innermost.name}" if innermost else ""
    return ", ".join(text for text in (activity, where) if text)


def user_line(error: BaseException) -> str:
    """Return the innermost line of an error's stack in the user's code, else in ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users_or_ours(frame)]
    users = [frame for frame in frames if not frame.filename.startswith(str(FOLDER))]
    frame = (users or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def is_polling(frame: FrameSummary) -> bool:
    """Tell whether a frame is that of `wait_until`: its caller's line says what is waited for."""
    return frame.name == wait_until.__name__ and frame.filename.endswith(f"{wait_until.__module__.replace('.', '/')}.py")


def _is_users_or_ours(frame: FrameSummary) -> bool:
    """Tell whether a line is the user's or ours, not a library's; ours that wait or poll do not count."""
    file = frame.filename
    if is_polling(frame) or any(part in file for part in FILES_THAT_WAIT):
        return False
    is_library = file.startswith((sysconfig.get_path("stdlib"), "<")) or "/site-packages/" in file or "/dist-packages/" in file
    return file.startswith(str(FOLDER)) or not is_library
