"""A process that imports, and waits: what is forked from it starts in a moment.

    its owner --(socket: open files, the first of which is the request)--> the fork server --> does what was asked for, a child of the owner
                                                       | before that, it forks the next server, which the kernel gives to the owner

Only a process with one thread may be forked like this: a lock that another thread holds just then stays locked in the child for ever. A
fork server has one, and has done nothing but import. Where an import has started more, it leaves no clone. Its owner may have any number:
it forks nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any

from ddp_train.system import handover
from ddp_train.system.process import STOP_SIGNALS, Child, adopts, close_all_but, die_with_parent, file_in_memory, fork, num_threads

_PID = struct.Struct("!Q")
_MAX_FILES = 253  # that the kernel takes at once
Entry = Callable[[dict[str, Any]], int]  # does what a request asks for, in the process that was asked, and returns its exit code


class ForkServer:
    """The owner's end.

    Args:
        door: the line to it, and to those that follow it.
        is_loaded: it has nothing to import: the next one is there at once.
    """

    def __init__(self, waiting: Child, door: socket.socket, *, is_loaded: bool) -> None:
        self._waiting: Child | None = waiting
        self._door, self._is_loaded = door, is_loaded

    def is_there(self) -> bool:
        """Tell whether a process waits. May wait itself, for one that imports still and was asked before."""
        if self._waiting is None:
            self._waiting = self._next()
        return self._waiting is not None and self._waiting.exit_code() is None

    def start(self, request: Mapping[str, Any], *, files: Sequence[int] = (), imports: Sequence[str] = (), is_last: bool = False) -> Child:
        """Let the process that waits do what is asked for, as soon as it has the imports, and return that child.

        Args:
            request: anything that JSON has. `files` is added to it.
            files: descriptors that it gets, with the same numbers.
            imports: what it imports first, and those that follow it have too.
            is_last: nothing else will be asked for.
        """
        assert self._waiting is not None, "is_there() was not asked"
        child, self._waiting = self._waiting, None
        if not is_last:
            adopts(True)
        asked = {"request": request, "files": list(files), "imports": list(imports), "is_last": is_last}
        text = file_in_memory(json.dumps(asked).encode())
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
        """End the process that waits, at once."""
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


def spawn_fork_server(environment: Mapping[str, str], imports: Sequence[str], *, command: Sequence[str] = ()) -> ForkServer:
    """Start a fresh interpreter that calls `run_fork_server`, in a session of its own.

    Args:
        environment: all that it has; it is told more.
        imports: what it imports while there is no request, in this order.
        command: what is run, in the place of `interpreter`.
    """
    door, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    words = [*(command or interpreter()), *imports]
    pid = os.posix_spawn(
        words[0],
        words,
        {**environment, handover.FORK_SERVER: f"{theirs.fileno()}:{os.getpid()}"},
        setsid=True,  # Ctrl-C on the terminal reaches the owner alone
        setsigmask=STOP_SIGNALS,  # until it has put aside Python's own handler, which would show a traceback
        setsigdef=STOP_SIGNALS,
    )
    theirs.close()
    return ForkServer(Child(pid), door, is_loaded=False)


def fork_as_server(entry: Entry, *, without: Sequence[int] = ()) -> ForkServer:
    """Fork this process, which must have one thread: what is forked waits with all that is imported here.

    `without`: descriptors that it closes: a lock would last, and a port be taken, as long as it has them.
    """
    door, theirs = socket.socketpair()
    owner = os.getpid()

    def wait() -> int:
        for descriptor in (door.detach(), *without):
            os.close(descriptor)
        os.setsid()
        return _serve(theirs, owner, entry)

    child = fork(wait)
    theirs.close()
    return ForkServer(child, door, is_loaded=True)


def run_fork_server(entry: Entry) -> int:
    """Import, wait, do what is asked for, and return the exit code of that.

    The request gets `loaded_with`, the environment in which this process has imported.
    """
    descriptor, _, owner = os.environ.pop(handover.FORK_SERVER).partition(":")
    die_with_parent(int(owner))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    door = socket.socket(fileno=int(descriptor))
    door.set_inheritable(False)
    close_all_but(0, 1, 2, door.fileno())  # files of others, whose end it would keep away
    loaded_with, imports = dict(os.environ), sys.argv[1:]
    sys.argv[1:] = []
    return _serve(door, int(owner), lambda request: entry({**request, "loaded_with": loaded_with}), imports)


def import_for_good(names: Iterable[str]) -> None:
    """Import modules without collecting garbage meanwhile, which takes a fifth of the time: what they make stays."""
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def interpreter() -> list[str]:
    """Return the command that torchrun starts each rank with."""
    return [sys.executable, "-u", "-m", "ddp_train"]


def _serve(door: socket.socket, owner: int, entry: Entry, imports: Sequence[str] = ()) -> int:
    """Import while nothing is asked for, and do what is; each process that is asked leaves a clone that waits in its place."""
    ahead = list(imports)
    while True:
        while ahead and not select.select([door], [], [], 0)[0]:
            with suppress(Exception):  # told where it is needed
                import_for_good([ahead.pop(0)])
        if (received := _receive(door)) is None:
            return 0
        asked, files = received
        problem: Exception | None = None
        try:
            import_for_good(asked["imports"])
        except Exception as error:
            problem = error
        if asked["is_last"] or not _leave_a_clone(owner):
            if problem is not None:
                raise problem
            _place(files, asked["files"], door)
            return entry({**asked["request"], "files": asked["files"]})
        for descriptor in files:
            os.close(descriptor)
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


def _receive(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request with its files; None: the owner has gone, or needs nothing."""
    try:
        _, received, _, _ = socket.recv_fds(door, 1, _MAX_FILES)
    except OSError:
        return None
    if not received:
        return None
    with open(received[0], "rb") as text:
        text.seek(0)  # where it stands is shared
        return json.load(text), list(received[1:])


def _place(files: Sequence[int], numbers: Sequence[int], door: socket.socket) -> None:
    """Give files that were received the numbers that they had, and close the line."""
    door.close()
    above = max(numbers, default=0) + 1
    moved = [fcntl(descriptor, F_DUPFD_CLOEXEC, above) for descriptor in files]
    for descriptor in files:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
