"""A process that has imported everything and waits: what it becomes starts in a moment.

    its owner --(socket: open files, the first of which is the request)--> the nursery --> becomes what was asked for, a child of the owner
                                                       | before that, it forks the next nursery, which the kernel gives to the owner

Only what has one thread may be forked like this: a lock that another thread holds just then stays locked in the child for ever. A nursery
has one, and has done nothing but import. Where something that was imported has started more, it leaves no clone. Its owner may have any
number: it forks nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any

from ddp_train.system import handover
from ddp_train.system.process import STOP_SIGNALS, Child, adopts, close_all_but, die_with_parent, file_in_memory, fork, num_threads

_PID = struct.Struct("!Q")
_MOST_FILES = 253  # that the kernel takes at once

_Asked = tuple[dict[str, Any], list[int]]  # what was asked for, and the files that came with it

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

    def start(self, request: Mapping[str, Any], *, files: Sequence[int] = (), is_last: bool = False, needs: str | None = None) -> Child:
        """Let what waits become what is asked for, as soon as it has imported, and return that child.

        Args:
            request: anything that JSON has. `files` is added to it.
            files: descriptors that it gets, with the same numbers.
            is_last: nothing else will be asked for.
            needs: it becomes so as soon as its `load` has yielded this; None: when all is imported.
        """
        assert self._waiting is not None, "is_there() was not asked"
        child, self._waiting = self._waiting, None
        if not is_last:
            adopts(True)
        text = file_in_memory(json.dumps({"request": request, "files": list(files), "is_last": is_last, "needs": needs}).encode())
        try:
            socket.send_fds(self._door, [b"?"], [text, *files])  # never waits, however long the text is: it may import still
        except OSError:
            child.signal(signal.SIGKILL)  # it has died, as a rule; its exit code says so
        finally:
            os.close(text)
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
            said = self._door.recv(_PID.size, socket.MSG_WAITALL)
        except OSError:
            said = b""
        adopts(False)  # what others leave without a parent is none of ours
        return Child(_PID.unpack(said)[0]) if len(said) == _PID.size else None


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
        setsigmask=STOP_SIGNALS,  # until it has put aside Python's own handler, which would show a traceback
        setsigdef=STOP_SIGNALS,
    )
    theirs.close()
    return Nursery(Child(pid), door, is_loaded=False)


def fork_nursery(become: Become, *, without: Sequence[int] = ()) -> Nursery:
    """Fork this process, which must have one thread: what is forked waits with all that is imported here.

    Args:
        without: descriptors that it closes: a lock would last, and a port be taken, as long as it has them.
    """
    door, theirs = socket.socketpair()
    owner = os.getpid()

    def wait() -> int:
        for each in (door.detach(), *without):
            os.close(each)
        os.setsid()
        return _serve(theirs, owner, become)

    child = fork(wait)
    theirs.close()
    return Nursery(child, door, is_loaded=True)


def wait_in_nursery(load: Callable[[], Generator[str, None, None]], become: Become, *, pauses_at: str | None = None) -> int:
    """Import, wait, and become what is asked for; return its exit code. What goes wrong while importing is told only then.

    Args:
        load: imports, and yields the name of what has been imported: a request that needs no more is served, while the clone goes on.
        become: see `Become`.
        pauses_at: what follows this name not all need. Before it a request is waited for, as long as the imports have taken.
    """
    began = time.perf_counter()
    descriptor, _, owner = os.environ.pop(handover.NURSERY).partition(":")
    die_with_parent(int(owner))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    door = socket.socket(fileno=int(descriptor))
    door.set_inheritable(False)
    close_all_but(0, 1, 2, door.fileno())  # files of others, whose end it would keep away
    problem: Exception | None = None
    held: _Asked | None = None
    loading, loaded = load(), set[str]()
    while True:
        try:
            loaded.add(name := next(loading))
        except StopIteration:
            break
        except Exception as error:
            problem = error
            break
        patience = time.perf_counter() - began if name == pauses_at else 0
        if held is None and select.select([door], [], [], patience)[0] and (held := _receive(door)) is None:
            return 0
        if held is not None and held[0]["needs"] in loaded:
            if held[0]["is_last"] or not _leave_a_clone(int(owner)):
                loading.close()
                return _become_asked(held, door, become)
            _let_go(held, door)
            held = None

    def become_or_fail(request: dict[str, Any]) -> int:
        if problem is not None:
            raise problem
        return become(request)

    return _serve(door, int(owner), become_or_fail, first=held)


def _serve(door: socket.socket, owner: int, become: Become, *, first: _Asked | None = None) -> int:
    """Wait until this process is asked to become something; each one that is asked leaves a clone that waits in its place."""
    while (found := first or _receive(door)) is not None:
        first = None
        if found[0]["is_last"] or not _leave_a_clone(owner):
            return _become_asked(found, door, become)
        _let_go(found, door)
    return 0


def _become_asked(found: _Asked, door: socket.socket, become: Become) -> int:
    asked, files = found
    _place(files, asked["files"], door)
    return become({**asked["request"], "files": asked["files"]})


def _let_go(found: _Asked, door: socket.socket) -> None:
    """Forget what another process becomes, and say that this one follows it."""
    for each in found[1]:
        os.close(each)
    door.sendall(_PID.pack(os.getpid()))


def _leave_a_clone(owner: int) -> bool:
    """Fork a process that becomes a child of the owner; return True in it, and False in this one, also where there is none."""
    if num_threads() > 1:
        return False
    try:
        between = os.fork()
    except OSError:  # no process more is to be had
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)  # the kernel gives the clone to the owner, who adopts (`start`)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    die_with_parent(owner)
    os.setsid()
    return True


def _receive(door: socket.socket) -> _Asked | None:
    """Return a request with its files; None: the owner has gone, or needs nothing."""
    try:
        _, found, _, _ = socket.recv_fds(door, 1, _MOST_FILES)
    except OSError:
        return None
    if not found:
        return None
    with open(found[0], "rb") as text:
        text.seek(0)  # where it stands is shared
        return json.load(text), list(found[1:])


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
