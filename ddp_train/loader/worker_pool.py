"""Worker processes that read ahead for one rank: they take requests in turn, and the results come back in the order of the requests.

They are forked from a server, a small process that has torch and no threads, never from the rank: a rank has threads (gloo's, NCCL's,
ours), and a process forked while one of them holds a lock may wait for that lock for ever (docs/decisions/0010-loader-workers.md).
"""

from __future__ import annotations

import io
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import cycle
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ddp_train.errors import UserError
from ddp_train.system import process_env, stack_dump
from ddp_train.system.process import STOP_SIGNALS, die_with_parent
from ddp_train.system.terminal import protect_streams

AHEAD = 2  # requests that each worker has been given
_ENDS_WITHIN_S = 2.0
_ALIGNMENT = 64  # bytes
_Place = tuple[int, torch.dtype, tuple[int, ...]]  # of a tensor in shared memory: its first byte, type and shape


def start_server() -> None:
    """Start the process that this one's workers are forked from, if it does not run yet.

    It imports torch, which takes seconds: a rank calls this early, and opens its process group meanwhile.
    """
    forkserver.set_forkserver_preload(["ddp_train.loader.worker_preload", "ddp_train.loader.loader"])
    os.environ[process_env.LOADER_RANK] = str(os.getpid())
    try:
        for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
            # An agent sends stop signals to the rank's whole process group; the rank reads on until it stops. Blocked signals stay so in
            # what is started here, and the first of the two unblocks them.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        del os.environ[process_env.LOADER_RANK]


class WorkerDied(Exception):
    """A worker ended while it had a request.

    Args:
        request: the one that it was working on.
        exit_code: negative for a signal; None: not known.
    """

    def __init__(self, request: Any, pid: int | None, exit_code: int | None) -> None:
        super().__init__(request, pid, exit_code)
        self.request, self.pid, self._exit_code = request, pid, exit_code

    def how(self) -> str:
        code = self._exit_code
        return "ended" if code is None else f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class WorkerPool:
    """Worker processes, each with a reading function. They end with the rank, however it ends.

    Args:
        reads: one function for each process, from a request to its result. Both are pickled; tensors travel through shared memory.
        pin_memory: results are in page-locked memory, for faster transfer to a GPU.

    Raises UserError: one of `reads` cannot be pickled.
    """

    def __init__(self, reads: Sequence[Callable[[Any], Any]], *, pin_memory: bool = False) -> None:
        start_server()
        self._workers = [_Worker(read) for read in reads]
        self._copying = _Copying() if pin_memory else None
        self._coming: Future[Any] | None = None  # the next result, which is on its way

    def results(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the result of each request.

        Raises WorkerDied: a worker did.
        Raises Exception: what the reading function raised, with the worker's traceback as a note.
        """
        pending: deque[tuple[Any, _Worker]] = deque()
        for request, worker in zip(requests, cycle(self._workers), strict=False):
            worker.ask(request)
            pending.append((request, worker))
            if len(pending) >= AHEAD * len(self._workers):
                yield self._pop(pending)
        while pending:
            yield self._pop(pending)

    def _pop(self, pending: deque[tuple[Any, _Worker]]) -> Any:
        """Return the result of the oldest request; the one after it is copied to page-locked memory from now on, while this one is used."""
        request, worker = pending.popleft()
        if self._copying is None:
            return worker.fetch(request, pin_memory=False)
        result = self._coming or self._copying.start(request, worker)
        self._coming = self._copying.start(*pending[0]) if pending else None
        return result.result()

    def close(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        if self._copying is not None:
            self._copying.end()
        for worker in self._workers:
            worker.end()


class _Copying:
    """A thread that takes one result after the other into page-locked memory: the training thread launches kernels meanwhile.

    It is no executor: Python waits for an executor's threads at the end of a process, and a worker may never answer.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[Any, _Worker, Future[Any]] | None] = SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = Thread(target=self._run, args=(device,), name="batches", daemon=True)
        self._thread.start()

    def start(self, request: Any, worker: _Worker) -> Future[Any]:
        future: Future[Any] = Future()
        self._requests.put((request, worker, future))
        return future

    def end(self) -> None:
        self._requests.put(None)
        self._thread.join()

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread has the first one, and would open a context there
        while (item := self._requests.get()) is not None:
            request, worker, future = item
            try:
                future.set_result(worker.fetch(request, pin_memory=True))
            except Exception as error:
                future.set_exception(error)
            del item, future  # and with them the batch


class _Worker:
    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._buffers = [SharedBatch() for _ in range(AHEAD)]
        self._next_buffer = cycle(self._buffers)  # the result of request n is in buffer n mod AHEAD: taken before n + AHEAD is asked
        self._connection, its_end = multiprocessing.Pipe()
        output = Connection(os.dup(2), readable=False)  # the rank's log; the server may have been started by another job
        buffers = [Connection(os.dup(buffer.descriptor)) for buffer in self._buffers]  # the one kind of descriptor that can be pickled
        arguments = read, its_end, buffers, output, dict(os.environ)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=arguments, name="loader worker", daemon=True)
        try:
            self._process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            happened = f"the data set cannot be sent to loader workers: {error}"
            expected = "a data set that can be pickled, because workers are not forked"
            fix = "open files and create lambdas in the methods that use them, or loader.num_workers=0"
            raise UserError(key="loader.num_workers", happened=happened, expected=expected, fix=fix) from error
        finally:
            for passed_on in (its_end, output, *buffers):
                passed_on.close()

    def ask(self, request: Any) -> None:
        with suppress(OSError):  # it died; its earlier requests come first
            self._connection.send(request)

    def fetch(self, request: Any, *, pin_memory: bool) -> Any:
        try:
            reply = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_ENDS_WITHIN_S)
            raise WorkerDied(request, self._process.pid, self._process.exitcode) from None
        if isinstance(reply, tuple):
            error, where = reply
            if not isinstance(error, UserError):
                error.add_note(f"in a loader worker (pid {self._process.pid}):\n{where}")
            raise error
        return next(self._next_buffer).copy_out(reply, pin_memory=pin_memory)

    def hang_up(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # a thread may wait for a reply, which closing would not end

    def end(self) -> None:
        self._connection.close()
        for buffer in self._buffers:
            buffer.close()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.exitcode is None:
            self._process.kill()


def _serve(
    read: Callable[[Any], Any], connection: Connection, buffers: list[Connection], output: Connection, environment: dict[str, str]
) -> None:
    die_with_parent()  # the server, which ends when the rank does
    rank = multiprocessing.parent_process()
    if rank is None or not rank.is_alive():
        return
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    protect_streams()  # streams without secrets, as the rank's
    logging.basicConfig(level=logging.INFO, format="%(asctime)s loader worker %(levelname)s %(message)s")
    torch.set_num_threads(1)
    stack_dump.dump_on_request()
    note = stack_dump.Note()  # for the report of a hang
    with suppress(EOFError, OSError):  # the rank has closed its end, perhaps with results unread
        for buffer in cycle([SharedBatch(descriptor.fileno()) for descriptor in buffers]):
            request = connection.recv()
            reply: bytes | tuple[Exception, str]
            try:
                note.write(str(request))
                reply = buffer.put(read(request))
            except Exception as error:
                reply = _portable(error), traceback.format_exc()
            note.write("")
            connection.send(reply)


def _portable(error: Exception) -> Exception:
    """Return the error itself, where another process can rebuild it."""
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class SharedBatch:
    """Memory that two processes share, with room for one batch, growing as needed: one puts a batch in, the other takes it out.

    Tensors are copied in and out, the rest of the batch travels with them as a pickle. Nothing is allocated for each batch, and a batch
    that was put in is there even if the process that put it in has ended since.

    `descriptor`: of the file in memory; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("batch") if descriptor is None else descriptor
        self._memory: mmap.mmap | None = None

    def put(self, batch: Any) -> bytes:
        text = io.BytesIO()
        _Packer(text, self).dump(batch)
        return text.getvalue()

    def copy_out(self, text: bytes, *, pin_memory: bool) -> Any:
        """Copy the batch out, where wanted into page-locked memory."""
        return _Unpacker(io.BytesIO(text), self, pin_memory).load()

    def close(self) -> None:
        self._memory = None
        os.close(self.descriptor)

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of that type and shape that begins at a byte."""
        numel = math.prod(shape)
        if not numel:
            return torch.empty(shape, dtype=dtype)
        end = offset + numel * dtype.itemsize
        if self._memory is None or len(self._memory) < end:
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, end)
            self._memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset).view(shape)


class _Packer(pickle.Pickler):
    """Copies the tensors into a buffer, and leaves in the pickle where they lie."""

    def __init__(self, file: io.BytesIO, buffer: SharedBatch) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._buffer, self._end = buffer, 0

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu" or obj.is_quantized:
            return None  # pickled as it is
        place = -(-self._end // _ALIGNMENT) * _ALIGNMENT, obj.dtype, tuple(obj.shape)
        self._buffer.view(*place).copy_(obj.detach())
        self._end = place[0] + obj.nbytes
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffer: SharedBatch, pin_memory: bool) -> None:
        super().__init__(file)
        self._buffer, self._pin_memory = buffer, pin_memory

    def persistent_load(self, pid: _Place) -> Tensor:
        return torch.empty(pid[2], dtype=pid[1], pin_memory=self._pin_memory).copy_(self._buffer.view(*pid))
