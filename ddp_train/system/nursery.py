"""A process that has imported everything and waits: what it becomes starts in a moment.

    its owner --(socket: a request, open files)--> the nursery --> becomes what was asked for, a child of the owner
                                                       | before that, it forks the next nursery, which the kernel gives to the owner

Only what has one thread may be forked like this: a lock that another thread holds just then stays locked in the child for ever. A nursery
has one, and has done nothing but import. Its owner may have any number: it forks nothing.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any

from ddp_train.system import handover
from ddp_train.system.process import STOP_SIGNALS, Child, adopts, die_with_parent, fork

_HEAD = struct.Struct("!QQ")  # bytes of the message, how many files come with it
_MOST_FILES = 64

Become = Callable[[dict[str, Any]], int]
"""Does what a request asks for, and returns the exit code of the process."""


class Nursery:
    """The owner's end. Made by `spawn` or `fork_nursery`.

    Args:
        waiting: the process that waits.
        door: the line to it, and to those that follow it.
        is_loaded: it has nothing to import: the next one is there at once.
    """

    def __init__(self, waiting: Child, door: socket.socket, *, is_loaded: bool) -> None:
        self._waiting: Child | None = waiting
        self._door, self._is_loaded = door, is_loaded

    def is_there(self) -> bool:
        """Tell whether something waits. May wait itself, for one that imports still and was asked before."""
        if self._waiting is None:
            self._waiting = self._next()
        return self._waiting is not None and self._waiting.exit_code() is None

    def start(self, request: Mapping[str, Any], *, files: Sequence[int] = (), is_last: bool = False) -> Child:
        """Let what waits become what is asked for, as soon as it has imported, and return that child.

        Args:
            request: anything that JSON has. `files` is added to it.
            files: descriptors that it gets, with the same numbers.
            is_last: nothing else will be asked for.
        """
        assert self._waiting is not None, "is_there() was not asked"
        child, self._waiting = self._waiting, None
        if not is_last:
            adopts(True)
        text = json.dumps({"request": request, "files": list(files), "is_last": is_last}).encode()
        with suppress(OSError):  # it has died: its exit code says so
            socket.send_fds(self._door, [_HEAD.pack(len(text), len(files))], list(files))
            self._door.sendall(text)
        if is_last:
            self._door.close()
        elif self._is_loaded:
            self._waiting = self._next()
        return child

    def end(self) -> None:
        """End what waits, at once."""
        self._door.close()
        if self._waiting is not None:
            self._waiting.signal(signal.SIGKILL)
            self._waiting.wait()
            self._waiting = None

    def _next(self) -> Child | None:
        """Return the one that follows the one that was asked; None where that could not be."""
        try:
            said = _read(self._door, _HEAD.size)
        except OSError:
            said = None
        adopts(False)  # what others leave without a parent is none of ours
        return None if said is None else Child(_HEAD.unpack(said)[0])


def spawn_nursery(command: Sequence[str], environment: Mapping[str, str]) -> Nursery:
    """Start a fresh interpreter that calls `wait_in_nursery`, in a session of its own.

    Args:
        command: what is run.
        environment: all that it has; it is told more.
    """
    door, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    pid = os.posix_spawn(
        command[0],
        list(command),
        {**environment, handover.NURSERY: f"{theirs.fileno()}:{os.getpid()}"},
        setsid=True,  # Ctrl-C on the terminal reaches the owner alone
        setsigmask=(),
        setsigdef=STOP_SIGNALS,
    )
    theirs.close()
    return Nursery(Child(pid), door, is_loaded=False)


def fork_nursery(become: Become) -> Nursery:
    """Fork this process, which must have one thread: what is forked waits with all that is imported here."""
    door, theirs = socket.socketpair()
    owner = os.getpid()

    def wait() -> int:
        door.close()
        os.setsid()
        return _serve(theirs, owner, become)

    child = fork(wait)
    theirs.close()
    return Nursery(child, door, is_loaded=True)


def wait_in_nursery(load: Callable[[], None], become: Become) -> int:
    """Import, wait, and become what is asked for; return its exit code. What goes wrong while importing is told only then."""
    descriptor, _, owner = os.environ.pop(handover.NURSERY).partition(":")
    die_with_parent(int(owner))
    door = socket.socket(fileno=int(descriptor))
    door.set_inheritable(False)
    os.closerange(3, door.fileno())  # files of others, whose end they would keep away
    os.closerange(door.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    problem: Exception | None = None
    try:
        load()
    except Exception as error:
        problem = error

    def become_or_fail(request: dict[str, Any]) -> int:
        if problem is not None:
            raise problem
        return become(request)

    return _serve(door, int(owner), become_or_fail)


def _serve(door: socket.socket, owner: int, become: Become) -> int:
    """Wait until this process is asked to become something; each one that is asked leaves a clone that waits in its place."""
    while (found := _receive(door)) is not None:
        asked, files = found
        if asked["is_last"] or not _leave_a_clone(owner):
            _place(files, asked["files"], door)
            return become({**asked["request"], "files": asked["files"]})
        for each in files:
            os.close(each)
        door.sendall(_HEAD.pack(os.getpid(), 0))
    return 0


def _leave_a_clone(owner: int) -> bool:
    """Fork a process that becomes a child of the owner; return True in it, and False in this one."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)  # the kernel gives the clone to the owner, who adopts (`start`)
    except OSError:  # no process more is to be had
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    die_with_parent(owner)
    os.setsid()
    return True


def _receive(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request with its files; None: the owner has gone, or needs nothing."""
    try:
        head, files, _, _ = socket.recv_fds(door, _HEAD.size, _MOST_FILES)
        if len(head) < _HEAD.size:
            return None
        text = _read(door, _HEAD.unpack(head)[0])
    except OSError:
        return None
    return None if text is None else (json.loads(text), list(files))


def _read(door: socket.socket, size: int) -> bytes | None:
    """Return so many bytes; None where the line ends before."""
    found = array.array("B")
    while len(found) < size:
        part = door.recv(min(size - len(found), 1 << 20))
        if not part:
            return None
        found.frombytes(part)
    return found.tobytes()


def _place(files: Sequence[int], numbers: Sequence[int], door: socket.socket) -> None:
    """Give files that were received the numbers that they had, and close the line."""
    door.close()
    above = max(numbers, default=0) + 1
    moved = [fcntl(each, F_DUPFD_CLOEXEC, above) for each in files]
    for each in files:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number, inheritable=False)
        os.close(each)


def interpreter() -> list[str]:
    """Return the command that torchrun starts each rank with."""
    return [sys.executable, "-u", "-m", "ddp_train"]
