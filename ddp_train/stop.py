"""A stop signal on any rank lets all ranks finish the same step; and the line between ranks that a failure's report needs.

Every rank has two threads while it works on a job. One is woken by a signal whatever the main thread does (Python runs its signal
handlers only between bytecodes, and a collective is none). The other reads messages, which all ranks get in the same order from the store
where they met. The main thread looks at two attributes and does nothing else: no collective, no waiting, no request to the store.

    a signal on any rank   "stop 15"   to all; rank 0's main thread sees it after some step s, and sends
                           "at s+1"    to all; it goes on when every rank has acknowledged that
                           "leave"     instead, while rank 0 does not train yet: every rank ends at once
    a checkpoint by time   "save s+1"  to all, by rank 0 after step s, in the same way
    a failing rank         "ask"       to all: the threads answer what their main threads are doing

Why it is the same step: nobody can finish step s+1 before rank 0 takes part in it, and by then all know that it is the last.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from threading import Event, Lock, Thread, main_thread
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, Store

from ddp_train import failure
from ddp_train.distributed import World
from ddp_train.process import STOP_SIGNALS, is_alive

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(days=1)  # of one read; below the 24 days that a time-out in milliseconds can hold
_ANSWERS_S = 1.0  # what a report waits for the other ranks
_CLOSE = 0  # no signal has this number

WALLTIME = signal.SIGALRM
"""What asks for the stop when the time of the run is up."""


class Stop:
    """Stops one job's ranks together. Made by the main thread of every rank, closed by it when the job is over.

    Args:
        world: the ranks.
        name: of the job, unique in the world's store.
        leave: what to do in a thread, on rank 0, before all ranks end without having trained.
        report: what to do in a thread before this rank ends, because the rank that it is given is gone without a word. It gets that
            rank's pid, and what the others were doing. None: an agent of ours reports it, and knows more.
        at: when rank 0 stops the run by itself, in seconds since the epoch, as if it had got the signal `WALLTIME`; None: never.
    """

    def __init__(
        self,
        world: World,
        *,
        name: str = "",
        leave: Callable[[signal.Signals], None] = lambda number: None,
        report: Callable[[int, int, dict[int, str]], None] | None = None,
        at: float | None = None,
    ) -> None:
        self._at = at if world.is_main else None
        self._signal: signal.Signals | None = None  # what asked for the stop
        self._asked = Event()
        self._last_step: int | None = None
        self._save_step: int | None = None  # after which all ranks save a checkpoint
        self._world, self._leave, self._report = world, leave, report
        self._can_save = False
        self._deciding = Lock()  # held by the thread that lets all leave, so that training cannot begin meanwhile
        self._said: Callable[[], str] | None = None
        self._is_lost = False
        machine = (socket.gethostname(), _pid_namespace(), os.environ.get("GROUP_RANK", "0"))
        self._neighbours = {  # rank -> pid, of those that we can see, and whose agent, which is ours, says how they ended
            rank: pid for rank, (where, pid) in enumerate(world.gather((machine, os.getpid()))) if where == machine and rank != world.rank
        }
        self._prefix = f"stop/{name}"
        self._store: Store | None = None
        self._threads = [Thread(target=self._listen, name="stop-signals", daemon=True)]
        if world.size > 1:
            assert world.store is not None
            self._store = self._connect()  # a connection serves one request at a time, and the reading thread always waits on its own
            self._threads.append(Thread(target=self._read, args=(self._connect(),), name="stop-messages", daemon=True))
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._handlers_before: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            self._handlers_before[number] = signal.signal(number, _to_the_thread)
            signal.siginterrupt(number, False)  # system calls of others' code go on as if nothing had happened
        for thread in self._threads:
            thread.start()

    def can_save(self) -> None:
        """Say that this rank trains from now on: a stop saves, instead of ending it at once."""
        with self._deciding:
            self._can_save = True

    def is_asked(self) -> bool:
        """Tell whether a stop was asked for, as far as this rank knows: others may not know yet."""
        return self._asked.is_set()

    def cause(self) -> signal.Signals:
        """Return the signal, once a stop is certain; the message of it may still be on its way."""
        self._asked.wait(timeout=60)
        return self._signal or signal.SIGTERM

    def comes_after(self, step: int) -> bool:
        """Tell whether this step is the last; after each step the same on every rank."""
        if self.is_asked() and self._last_step is None and self._world.is_main:
            self._choose(step)
        return self._last_step is not None and step >= self._last_step

    def saves_after(self, step: int, is_due: bool) -> bool:
        """Tell whether a checkpoint was agreed on for this step; asked after each step, the same on every rank.

        Args:
            is_due: rank 0 alone: agree on one for the next step; alone in the world, for this one.
        """
        if self._store is None:
            return is_due
        if is_due and self._world.is_main and self._save_step != step:
            self._agree("save", step + 1)
        return self._save_step == step

    def say(self, doing: Callable[[], str], *, is_lost: bool = False) -> None:
        """Answer this, from now on, when another rank asks what this one is doing.

        Args:
            is_lost: another rank is gone, and this one only waits to be ended: the next signal ends it.
        """
        self._said, self._is_lost = doing, is_lost  # before anything that takes its time: others may be asking already
        logger.info(failure.was(doing()))

    def gone(self) -> tuple[int, int] | None:
        """Return rank and pid of a rank on this machine that has ended, if there is one."""
        return next(((rank, pid) for rank, pid in self._neighbours.items() if not is_alive(pid)), None)

    def ask_others(self) -> dict[int, str]:
        """Return what the other ranks are doing, by rank, those left out that have ended. Waits a second at most."""
        if self._store is None:
            return {}
        answers: dict[int, str] = {}
        gone = [rank for rank, pid in self._neighbours.items() if not is_alive(pid)]
        others = [rank for rank in range(self._world.size) if rank not in (self._world.rank, *gone)]
        try:
            _send(self._store, "ask")
            deadline = time.monotonic() + _ANSWERS_S
            while len(answers) < len(others) and time.monotonic() < deadline:
                missing = [rank for rank in others if rank not in answers]
                answers |= {rank: self._store.get(f"doing/{rank}").decode() for rank in missing if self._store.check([f"doing/{rank}"])}
                time.sleep(0.02)
        except DistError:
            logger.info("the other ranks cannot be asked: the store is gone")
        return {rank: answers.get(rank, "gave no answer") for rank in others}

    def close(self) -> None:
        """End the threads and put back what was there before. Every rank calls it; the others' end with rank 0's call."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._waker.send(bytes([_CLOSE]))
        if self._store is not None and self._world.is_main:
            _send(self._store, "closed")
        for thread in self._threads:
            thread.join(timeout=10)
        self._waker.close()
        self._woken.close()

    def _choose(self, step: int) -> None:
        """Make the next step the last one, on all ranks (rank 0's main thread)."""
        if self._store is None:
            self._last_step = step
            return
        self._agree("at", step + 1)

    def _agree(self, kind: str, step: int) -> None:
        """Tell all ranks what comes after a step that none of them can have finished, and wait until they know (rank 0's main thread)."""
        assert self._store is not None
        _send(self._store, f"{kind} {step}")
        known = [f"knows/{kind} {step}/{rank}" for rank in range(self._world.size)]
        self._store.wait(known, timedelta(seconds=60))  # their threads answer in no time

    def _listen(self) -> None:
        """Wait for signals, and on rank 0 for the time to stop (a thread)."""
        while True:
            self._woken.settimeout(None if self._at is None else min(max(0.0, self._at - time.time()), _PATIENCE.total_seconds()))
            try:
                numbers = self._woken.recv(64)  # of every signal that has a Python handler
            except (TimeoutError, BlockingIOError):  # the second where nothing was left to wait
                if self._at is not None and time.time() >= self._at:
                    self._at = None
                    self._on_signal(WALLTIME)
                continue
            if _CLOSE in numbers:
                return
            for number in set(numbers) & set(STOP_SIGNALS):
                self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        lost = self.gone()
        if lost is not None and self._all_leave():
            return
        if lost is not None or self._is_lost:  # the agent ends us after a failure: what remains is a broken collective
            if lost is not None:
                doing = self._doing()
                self.say(lambda: doing, is_lost=True)
                if self._report is not None:
                    self._report(*lost, {self._world.rank: doing} | self.ask_others())
            _end(128 + number)
        if self._store is None:
            self._on_stop(number)
            return
        try:
            if self._store.add("signals", 1) == 1:
                _send(self._store, f"stop {number:d}")
        except DistError:
            _end(128 + number)  # the others are gone

    def _read(self, store: Store) -> None:
        """Read the messages (a thread)."""
        rank = self._world.rank
        for position in count(1):
            try:
                kind, _, value = _wait_for(store, f"message/{position}").partition(" ")
                if kind == "stop":
                    self._on_stop(signal.Signals(int(value)), store)
                elif kind == "at":
                    self._last_step = int(value)
                    store.set(f"knows/{kind} {value}/{rank}", "")
                elif kind == "save":
                    self._save_step = int(value)
                    store.set(f"knows/{kind} {value}/{rank}", "")
                elif kind == "leave":
                    self._go(store)
                elif kind == "ask":
                    store.set(f"doing/{rank}", self._doing())
                elif kind == "closed":
                    return
            except DistError:
                return  # the store is gone, and soon we are too

    def _on_stop(self, number: signal.Signals, store: Store | None = None) -> None:
        """Tell the main thread, or, where it has nothing to save yet, end all ranks. Rank 0 knows for all of them."""
        self._signal = number
        if not self._world.is_main:
            self._asked.set()
            return
        self._deciding.acquire()
        self._asked.set()
        if self._can_save:
            self._deciding.release()
            return
        if store is not None:
            store.set("leaving", "")
            _send(store, "leave")
        else:
            self._go(None)

    def _go(self, store: Store | None) -> None:
        """End this rank, rank 0 last: with it may go the store."""
        if self._world.is_main:
            if store is not None:
                others = [f"left/{rank}" for rank in range(1, self._world.size)]
                deadline = time.monotonic() + _ANSWERS_S
                while not store.check(others) and time.monotonic() < deadline:
                    time.sleep(0.02)
            self._leave(self.cause())
        elif store is not None:
            store.set(f"left/{self._world.rank}", "")
        _end(0)  # not a failure: an agent that restarts failed ranks must not restart this one

    def _all_leave(self) -> bool:
        """Tell whether ranks that are gone have left because rank 0 told all to."""
        try:
            return self._store is not None and self._store.check(["leaving"])
        except DistError:
            return False

    def _doing(self) -> str:
        return self._said() if self._said else failure.describe(traceback.extract_stack(sys._current_frames()[main_thread().ident or 0]))

    def _connect(self) -> Store:
        assert self._world.store is not None
        return PrefixStore(self._prefix, self._world.store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it


def _to_the_thread(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor has told the thread already."""


def _send(store: Store, message: str) -> None:
    store.set(f"message/{store.add('messages', 1)}", message)


def _wait_for(store: Store, key: str) -> str:
    while True:
        started = time.monotonic()
        try:
            store.wait([key], _PATIENCE)
            return store.get(key).decode()
        except DistStoreError:
            if time.monotonic() - started < _PATIENCE.total_seconds() / 2:
                raise  # not the time-out


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _end(code: int) -> None:
    """End the process from a thread, without the tidying that would wait for the main thread."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    logging.shutdown()
    os._exit(code)
