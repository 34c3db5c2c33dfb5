"""A stop signal on any rank lets all ranks finish the same step.

Every rank has two threads while it works on a job. One is woken by a signal whatever the main thread does (Python runs its signal
handlers only between bytecodes, and a collective is none). The other reads messages, which all ranks get in the same order (`peers`).
The main thread takes a lock between two steps and does nothing else: no collective, no request to the store.

    a signal on any rank   "stop 15"         to all: each thread answers which step its main thread has begun, and lets it begin no other
                           "agreed stop s"   to all, by the thread that answered last: s is the furthest step that any rank has begun
                           "leave"           instead, while rank 0 does not train yet: every rank ends at once
    a checkpoint by time   "save"            to all, by rank 0 when one is due; agreed on in the same way

Why it is the same step: no rank has finished step s when it is agreed on, and none begins step s+1 before it knows. Nothing is assumed of
the steps: ranks may run ahead of each other as far as they like, as they do where collectives only enqueue or come every few steps.
Why nobody waits for long: only threads answer, which wait for no main thread.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

from torch.distributed import DistError

from ddp_train.distributed.world import World
from ddp_train.rank.peers import Peers
from ddp_train.system import torchrun_env
from ddp_train.system.process import STOP_SIGNALS, exit_at_once, handles_signal

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 86_400.0  # a socket's time-out has a limit
_AGENT_LOOKS_S = 2.0  # every tenth of a second, where nobody says otherwise
_CLOSE = 0  # no signal has this number
WALLTIME = signal.SIGALRM  # what asks for the stop when the time of the run is up


class Stop:
    """Stops one job's ranks together. Made by the main thread of every rank, closed by it when the job is over.

    Args:
        peers: the line to the others, which `close` closes.
        leave: what to do in a thread, on rank 0, before all ranks end without having trained.
        report: what to do in a thread before this rank ends, because the rank that it is given is gone without a word. It gets that
            rank's pid, and what the others were doing. None: an agent of ours reports it, and knows more.
        at: when rank 0 stops the run by itself, in seconds since the epoch, as if it had got the signal `WALLTIME`; None: never.
        at_by_now: asked when that time has come: it may have been moved.
        ends_agent: the ranks' agent is a user's torchrun, and no sweep's, which outlives them.
    """

    def __init__(
        self,
        world: World,
        peers: Peers,
        *,
        leave: Callable[[signal.Signals], None] = lambda number: None,
        report: Callable[[int, int, dict[int, str]], None] | None = None,
        at: float | None = None,
        at_by_now: Callable[[], float | None] = lambda: None,
        ends_agent: bool = False,
    ) -> None:
        self._world, self._peers, self._leave, self._report = world, peers, leave, report
        self._ends_agent = ends_agent
        self._at = at if world.is_main else None
        self._at_by_now = at_by_now
        self._signal: signal.Signals | None = None  # what asked for the stop
        self._is_told = False  # by a signal to this very process, which torchrun passes on from itself
        self._asked = Event()
        self.is_asked = self._asked.is_set  # as far as this rank knows: others may not know yet
        self._turn = Lock()  # to begin a step; the reading thread keeps it while a step is being agreed on
        self._begun = 0  # the newest step that the main thread has begun
        self._open = 0  # steps that are being agreed on
        self._last_step: int | None = None
        self._saves: deque[int] = deque()  # steps after which all ranks save a checkpoint, those to come
        self._has_asked_to_save = False
        self._can_save = False
        self._deciding = Lock()  # held by the thread that lets all leave, so that training cannot begin meanwhile
        self._threads = [Thread(target=self._listen, name="stop-signals", daemon=True)]
        if not peers.is_alone:
            self._threads.append(Thread(target=self._read, name="stop-messages", daemon=True))
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._handlers_before: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            # Python's own handler has nothing to do: the wake-up descriptor has told the thread already.
            self._handlers_before[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # system calls of others' code go on as if nothing had happened
        for thread in self._threads:
            thread.start()

    def trains_after(self, step: int) -> None:
        """Say that this rank trains from now on, after so many steps: a stop saves, instead of ending it at once."""
        with self._turn:
            self._begun = step + 1
        with self._deciding:
            self._can_save = True

    def cause(self) -> signal.Signals:
        """Return the signal, once a stop is certain; the message of it may still be on its way."""
        self._asked.wait(timeout=60)
        return self._signal or signal.SIGTERM

    def comes_after(self, step: int) -> bool:
        """Tell whether this step is the last; after each step the same on every rank. If not, the next one counts as begun."""
        if self._peers.is_alone:
            return self._asked.is_set()
        with self._turn:
            is_last = self._last_step is not None and step >= self._last_step  # beyond it where that step was taken back
            if not is_last:
                self._begun = step + 1
        return is_last

    def saves_after(self, step: int, is_due: bool) -> bool:
        """Tell whether a checkpoint was agreed on for this step; asked after each step, and after `comes_after`, the same on every rank.

        Args:
            is_due: rank 0 alone: agree on a step soon; alone in the world, on this one.
        """
        if self._peers.is_alone:
            return is_due
        saves = bool(self._saves) and step >= self._saves[0]
        if saves:
            self._saves.popleft()
            self._has_asked_to_save = False
        elif is_due and self._world.is_main and not self._has_asked_to_save:
            self._has_asked_to_save = True
            self._peers.send("save")
        return saves

    def close(self) -> None:
        """End the threads and put back what was there before. Every rank calls it; the others' end with rank 0's call."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._waker.send(bytes([_CLOSE]))
        self._peers.close()
        for thread in self._threads:
            thread.join(timeout=10)
        self._waker.close()
        self._woken.close()

    def end_agent(self) -> None:
        """End the agent, if it is a user's, after a stop: the last thing that this rank does."""
        if self._ends_agent:
            end_agent(lambda: self._is_told)

    def _listen(self) -> None:
        """Wait for signals, and on rank 0 for the time to stop (a thread)."""
        while True:
            self._woken.settimeout(None if self._at is None else min(max(0.0, self._at - time.time()), _LONGEST_WAIT_S))
            try:
                numbers = self._woken.recv(64)  # of every signal that has a Python handler
            except (TimeoutError, BlockingIOError):  # the second where nothing was left to wait
                if self._at is not None and time.time() >= self._at:
                    by_now = self._at_by_now()
                    self._at = by_now if by_now is not None and by_now > time.time() else None
                    if self._at is None:
                        self._on_signal(WALLTIME)
                continue
            if _CLOSE in numbers:
                return
            for number in set(numbers) & set(STOP_SIGNALS):
                self._is_told = True
                self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        lost = self._peers.dead_neighbour()
        with suppress(DistError):  # the store is gone
            if lost is not None and self._peers.store.check(["leaving"]):  # it has left because rank 0 told all to
                return
        if lost is not None or self._peers.is_lost:  # the agent ends us after a failure: what remains is a broken collective
            if lost is not None:
                doing = self._peers.doing()
                self._peers.report_activity(lambda: doing, is_lost=True)
                if self._report is not None:
                    self._report(*lost, {self._world.rank: doing} | self._peers.ask_others())
            exit_at_once(128 + number)
        if self._peers.is_alone:
            self._on_stop(number)
            return
        try:
            if self._peers.store.add("signals", 1) == 1:
                self._peers.send(f"stop {number:d}")
        except DistError:
            exit_at_once(128 + number)  # the others are gone

    def _read(self) -> None:
        """Read the messages (a thread), and keep the main thread from beginning a step while one is being agreed on."""
        try:
            for position, message in self._peers.messages():
                kind, *values = message.split()
                if kind == "stop":
                    self._on_stop(signal.Signals(int(values[0])))
                if kind in ("stop", "save"):
                    self._answer(kind, place=f"begun/{position}")
                elif kind == "agreed":
                    self._agree(values[0], int(values[1]))
                elif kind == "leave":
                    self._go()
        except DistError:
            return  # the store is gone, and soon we are too
        finally:
            if self._open:
                self._turn.release()  # the main thread finds out by itself

    def _answer(self, kind: str, *, place: str) -> None:
        """Say which step this rank has begun, and let it begin no other before all have said so; whoever is last tells them."""
        if not self._open:
            self._turn.acquire()
        self._open += 1
        store = self._peers.store
        store.set(f"{place}/{self._world.rank}", f"{self._begun}")
        if store.add(place, 1) == self._world.size:
            begun = store.multi_get([f"{place}/{rank}" for rank in range(self._world.size)])
            self._peers.send(f"agreed {kind} {max(map(int, begun))}")

    def _agree(self, kind: str, step: int) -> None:
        logger.info("all ranks %s after step %d", kind, step)
        if kind == "stop":
            self._last_step = step
        else:
            self._saves.append(step)
        self._open -= 1
        if not self._open:
            self._turn.release()

    def _on_stop(self, number: signal.Signals) -> None:
        """Tell the main thread, or, where it has nothing to save yet, end all ranks. Rank 0 knows for all of them."""
        self._signal = number
        if not self._world.is_main:
            self._asked.set()
            return
        self._deciding.acquire()
        self._asked.set()
        if self._can_save:
            self._deciding.release()
        elif self._peers.is_alone:
            self._go()
        else:
            self._peers.store.set("leaving", "")
            self._peers.send("leave")

    def _go(self) -> None:
        """End this rank, rank 0 last."""
        self._peers.leave_together()
        if self._world.is_main:
            self._leave(self.cause())
        self.end_agent()
        exit_at_once(0)  # not a failure: an agent that restarts failed ranks must not restart this one


def end_agent(is_told: Callable[[], bool]) -> None:
    """End a user's torchrun after a stop: the last thing that the first rank of each machine does.

    torchrun takes its ranks' exit code 0 for a run that is finished, and waits minutes for those of other machines, which may be gone;
    any other code it takes for a failure, and starts the ranks again. Ended by SIGTERM it exits with 1.

    Args:
        is_told: tells whether this process has had a signal, which torchrun passes on from itself.
    """
    agent = os.getppid()
    if torchrun_env.local_rank() != 0 or not handles_signal(agent, signal.SIGTERM):
        return
    if torchrun_env.num_nodes() > 1 and not is_told():  # that of another machine may be the first to see that one has come or gone
        time.sleep(_AGENT_LOOKS_S)
    if is_told():
        return
    print(
        "stopped, not finished: torchrun ends with exit code 1, by SIGTERM; what it says below is no failure", file=sys.stderr, flush=True
    )
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGTERM)
