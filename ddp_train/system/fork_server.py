"""A process that imports modules, waits for a request and serves it at once, after forking a clone that waits for the next one.

    its owner --(socket: open files, the first of which is the request)--> the fork server --> serves the request, as a child of the owner
                                                       | before that, it forks the next server, which the kernel makes a child of the owner

Only a process with one thread may be forked like this: a lock that another thread holds at that moment stays locked in the child for ever.
A fork server has one thread, and has only imported. If an import has started more threads, it forks no clone. Its owner may have any
number of threads: it forks nothing.
"""

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Any

from ddp_train.system import process_env
from ddp_train.system.process import STOP_SIGNALS, Child, close_all_but, die_with_parent, file_in_memory, fork, num_threads, set_subreaper

_PID = struct.Struct("!Q")
_MAX_FILES = 253  # that the kernel takes at once
RequestHandler = Callable[[Any], int]  # serves a request in the fork server's process, and returns the exit code


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """What a process is asked for. A subclass says what it is to do."""

    files: Sequence[int] = ()  # descriptors that it inherits, with the same numbers
    imports: Sequence[str] = ()  # modules to import first; later clones have them too
    is_last: bool = False  # no request follows


class ForkServer:
    """The owner's end of a fork server: the process that waits for a request, and the socket to it and to its clones (`request_socket`).

    `is_loaded`: it has nothing to import, and the next one is ready at once.
    """

    def __init__(self, waiting: Child, request_socket: socket.socket, *, is_loaded: bool) -> None:
        self._waiting: Child | None = waiting
        self._request_socket, self._is_loaded = request_socket, is_loaded

    def wait_until_ready(self) -> bool:
        """Wait while the process that got the last request still imports; return whether one is left that serves another."""
        self._waiting = self._waiting or self._next()
        return self._waiting is not None and self._waiting.exit_code() is None

    def start(self, request: ForkRequest) -> Child:
        """Send a request to the waiting process, which serves it after its imports; return that child."""
        child, self._waiting = self._waiting or self._next(), None
        assert child is not None, "none is left (`wait_until_ready`)"
        if not request.is_last:
            set_subreaper(True)
        content = file_in_memory(pickle.dumps(request))
        try:
            # Never blocks, however long the request is: the process may still import.
            socket.send_fds(self._request_socket, [b"?"], [content, *request.files])
        except OSError:
            child.signal(signal.SIGKILL)  # usually it has died; its exit code says so
        finally:
            os.close(content)
        if request.is_last:
            self._request_socket.close()
        elif self._is_loaded:
            self._waiting = self._next()
        return child

    def end(self) -> None:
        self._request_socket.close()
        if self._waiting is not None:
            self._waiting.signal(signal.SIGKILL)
            self._waiting.wait()
            self._waiting = None

    def _next(self) -> Child | None:
        """Return the clone of the process that got the last request; None: it forked none."""
        try:
            answer = self._request_socket.recv(_PID.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        set_subreaper(False)  # orphans of others are not ours
        return Child(_PID.unpack(answer)[0]) if len(answer) == _PID.size else None


def spawn_fork_server(environment: Mapping[str, str], imports: Sequence[str], *, command: Sequence[str] = ()) -> ForkServer:
    """Start a fresh interpreter that calls `run_fork_server`, in a session of its own.

    Args:
        environment: its whole environment; FORK_SERVER is added.
        imports: modules that it imports while there is no request, in this order.
        command: the command to run instead of `interpreter()`.
    """
    request_socket, server_end = socket.socketpair()
    server_end.set_inheritable(True)
    words = [*(command or interpreter()), *imports]
    pid = os.posix_spawn(
        words[0],
        words,
        {**environment, process_env.FORK_SERVER: f"{server_end.fileno()}:{os.getpid()}"},
        setsid=True,  # Ctrl-C on the terminal reaches the owner alone
        setsigmask=STOP_SIGNALS,  # until it has put aside Python's own handler, which would show a traceback
        setsigdef=STOP_SIGNALS,
    )
    server_end.close()
    return ForkServer(Child(pid), request_socket, is_loaded=False)


def fork_as_server(handler: RequestHandler, *, without: Sequence[int] = ()) -> ForkServer:
    """Fork this process, which must have one thread: the fork waits for a request, with all modules of this process.

    `without`: descriptors that it closes: a lock or a port would stay taken as long as it has them.
    """
    request_socket, server_end = socket.socketpair()
    owner = os.getpid()

    def wait() -> int:
        for descriptor in (request_socket.detach(), *without):
            os.close(descriptor)
        os.setsid()
        return _serve(server_end, owner, handler)

    child = fork(wait)
    server_end.close()
    return ForkServer(child, request_socket, is_loaded=True)


def run_fork_server(handler: RequestHandler, imports: Sequence[str]) -> int:
    """Import modules, wait for a request, serve it and return its exit code."""
    descriptor, _, owner = os.environ.pop(process_env.FORK_SERVER).partition(":")
    die_with_parent(int(owner))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    request_socket = socket.socket(fileno=int(descriptor))
    request_socket.set_inheritable(False)
    close_all_but(0, 1, 2, request_socket.fileno())  # copies of files of others, which would keep their end-of-file away
    return _serve(request_socket, int(owner), handler, imports)


def import_for_good(names: Iterable[str]) -> None:
    """Import modules without garbage collection, which takes a fifth of the time: their objects stay."""
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


def _serve(request_socket: socket.socket, owner: int, handler: RequestHandler, imports: Sequence[str] = ()) -> int:
    """Import while there is no request, then serve one; each process that gets a request forks a clone to wait in its place."""
    pending = list(imports)
    while True:
        while pending and not select.select([request_socket], [], [], 0)[0]:
            with suppress(Exception):  # raised again where it is needed
                import_for_good([pending.pop(0)])
        if (received := _receive(request_socket)) is None:
            return 0
        request, files = received
        problem: Exception | None = None
        try:
            import_for_good(request.imports)
        except Exception as error:
            problem = error
        if request.is_last or not _fork_clone(owner):
            if problem is not None:
                raise problem
            _restore_numbers(files, request.files, request_socket)
            return handler(request)
        for descriptor in files:
            os.close(descriptor)
        request_socket.sendall(_PID.pack(os.getpid()))


def _fork_clone(owner: int) -> bool:
    """Fork a process that becomes a child of the owner; return True in it, and False in this one, also if the fork failed."""
    if num_threads() > 1:
        return False
    try:
        between = os.fork()
    except OSError:  # the limit of processes is reached
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)  # the kernel makes the clone a child of the owner, which is a subreaper (`start`)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    die_with_parent(owner)
    os.setsid()
    return True


def _receive(request_socket: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Return a request with its files; None: the owner has ended, or needs nothing."""
    try:
        _, received, _, _ = socket.recv_fds(request_socket, 1, _MAX_FILES)
    except OSError:
        return None
    if not received:
        return None
    with open(received[0], "rb") as content:
        content.seek(0)  # the position is shared
        return pickle.load(content), list(received[1:])


def _restore_numbers(files: Sequence[int], numbers: Sequence[int], request_socket: socket.socket) -> None:
    """Give received files the descriptor numbers that they had, and close the socket."""
    request_socket.close()
    above = max(numbers, default=0) + 1
    moved = [fcntl(descriptor, F_DUPFD_CLOEXEC, above) for descriptor in files]
    for descriptor in files:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
