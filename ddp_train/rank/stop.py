"""A stop signal on any rank lets all ranks finish the same step.

Every rank has two threads while it works on a job (`Stop`). The signal thread (`SignalListener`) is woken by a signal whatever the main
thread does (Python runs its handlers only between bytecodes, and a collective is none). The message thread reads messages, which all ranks
get in the same order (`peers`). The main thread takes a lock between two steps (`StepAgreement`) and does nothing else: no collective, no
request to the store.

    a signal on any rank   STOP 15         to all: each rank answers which step its main thread has begun, and lets it begin no other
                           STOP_AGREED s   to all, by the rank that answered last: s is the furthest step that any rank has begun
                           LEAVE           to all, by rank 0 if it does not train yet: every rank ends at once
    a checkpoint by time   SAVE            to all, by rank 0 when one is due; agreed on in the same way (SAVE_AGREED s)

Why it is the same step: no rank has finished step s when it is agreed on, and none begins step s+1 before it knows. Nothing is assumed of
the steps: ranks may run ahead of each other as far as they like, as they do where collectives only enqueue or come every few steps.
Why no rank waits for long: message threads answer, and they wait for no main thread.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import NoReturn

from torch.distributed import DistError

from ddp_train.distributed.world import World
from ddp_train.errors import shell_code
from ddp_train.rank.peers import MessageKind, Neighbour, Peers, RankMessage
from ddp_train.system import process_env
from ddp_train.system.process import STOP_SIGNALS, exit_at_once, handles_signal
from ddp_train.training.loop.hooks import Agreed

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 86_400.0  # a socket's time-out has a limit
_AGENT_POLLS_WITHIN_S = 2.0  # torchrun's agent polls every tenth of a second, if not configured otherwise
_CLOSE = 0  # no signal has this number
WALLTIME = signal.SIGALRM  # what asks for the stop when the time of the run is up


class SignalListener:
    """Calls `on_signal` in the signal thread at each stop signal, and when the deadline has come (seconds since the epoch)."""

    def __init__(
        self, on_signal: Callable[[signal.Signals], None], deadline: float | None, ask_deadline: Callable[[], float | None]
    ) -> None:
        self._on_signal, self._deadline, self._ask_deadline = on_signal, deadline, ask_deadline
        self._waker, self._woken = socket.socketpair()  # open after an exception, too
        self._waker.setblocking(False)
        self._thread = Thread(target=self._wait_for_signals, name="stop-signals", daemon=True)
        self.was_signalled = False  # by another process: torchrun passes its signal on to its ranks, and knows of the stop

    @contextmanager
    def listening(self) -> Iterator[None]:
        wakeup_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        # Python's own handlers have nothing to do: the wake-up descriptor has told the signal thread already.
        handlers_before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.siginterrupt(number, False)  # system calls of others' code go on as if nothing had happened
        self._thread.start()
        yield
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        self._waker.send(bytes([_CLOSE]))
        self._thread.join(timeout=10)
        self._waker.close()
        self._woken.close()

    def _wait_for_signals(self) -> None:
        while True:
            self._woken.settimeout(None if self._deadline is None else min(max(0.0, self._deadline - time.time()), _LONGEST_WAIT_S))
            try:
                numbers = self._woken.recv(64)  # of every signal that has a Python handler
            except (TimeoutError, BlockingIOError):  # BlockingIOError if the deadline had passed before
                if self._deadline is not None and time.time() >= self._deadline:
                    deadline = self._ask_deadline()
                    self._deadline = deadline if deadline is not None and deadline > time.time() else None
                    if self._deadline is None:
                        self._on_signal(WALLTIME)
                continue
            if _CLOSE in numbers:
                return
            for number in set(numbers) & set(STOP_SIGNALS):
                self.was_signalled = True
                self._on_signal(signal.Signals(number))


class StepAgreement:
    """Lets several ranks agree on the step after which they all stop, or all save.

    The message thread opens, closes and gives up agreements. The main thread does the rest, and begins no step while one is open.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        # Written by the main thread under `_gate`, which the message thread holds while any agreement is open.
        self._gate = Lock()
        self._newest_begun_step = 0
        # Written by the message thread while it holds `_gate`; the main thread removes from `_saves`.
        self._num_open = 0
        self._last_step: int | None = None
        self._saves: deque[int] = deque()  # steps after which all ranks save a checkpoint, those to come
        self._has_asked_to_save = False  # written by the main thread

    def open(self, result: MessageKind, *, position: int) -> None:
        """Answer a message with this rank's newest step; it begins no other before all have answered, and the last sends `result`."""
        if not self._num_open:
            self._gate.acquire()
        self._num_open += 1
        if (begun_steps := self._peers.answer(position, self._newest_begun_step)) is not None:
            self._peers.send(result, max(begun_steps))

    def close(self, agreed: RankMessage) -> None:
        is_stop = agreed.kind is MessageKind.STOP_AGREED
        logger.info("all ranks %s after step %d", "stop" if is_stop else "save", agreed.number)
        if is_stop:
            self._last_step = agreed.number
        else:
            self._saves.append(agreed.number)
        self._num_open -= 1
        if not self._num_open:
            self._gate.release()

    def give_up(self) -> None:
        """Let the main thread go on, which finds out by itself that the others are gone. No message comes any more."""
        if self._num_open:
            self._gate.release()

    def begin(self, step: int) -> None:
        with self._gate:
            self._newest_begun_step = step

    def after(self, steps_run: int) -> Agreed:
        """Return what is agreed on a step, and begin the next one unless it was the last (`Stop.agree_after`)."""
        with self._gate:
            is_last_step = self._last_step is not None and steps_run >= self._last_step  # beyond it where that step was taken back
            if not is_last_step:
                self._newest_begun_step = steps_run + 1
        if is_save_agreed := bool(self._saves) and steps_run >= self._saves[0]:
            self._saves.popleft()
            self._has_asked_to_save = False
        return Agreed(is_last_step, is_save_agreed)

    def ask_to_save(self) -> None:
        if not self._has_asked_to_save:
            self._has_asked_to_save = True
            self._peers.send(MessageKind.SAVE)


@dataclass(kw_only=True)
class Stop:
    """Stops one job's ranks together while it is `listening`."""

    world: World
    peers: Peers
    on_untrained_stop: Callable[[signal.Signals], None] = lambda number: None  # in a thread, on rank 0, before all end untrained
    # Called in a thread before this rank ends because another one ended without a report: gets that one, and what the others were doing.
    report_lost_rank: Callable[[Neighbour, dict[int, str]], None] | None = None  # None: an agent of ours reports it, and knows more
    stops_at: float | None = None  # rank 0 stops the run by itself, as if by `WALLTIME`; seconds since the epoch; None: never
    ask_stops_at: Callable[[], float | None] = lambda: None  # called when that time has come: it may have been moved
    ends_agent: bool = False  # the ranks' agent is a user's torchrun, and no sweep's, which outlives them

    def __post_init__(self) -> None:
        self._signals = SignalListener(self._on_signal, self.stops_at if self.world.is_main else None, self.ask_stops_at)
        self._agreement = StepAgreement(self.peers)
        # Written by the message thread; if this rank is alone, by the signal thread.
        self._signal: signal.Signals | None = None  # what asked for the stop; written before `_asked` is set
        self._asked = Event()
        # Written by the main thread under `_leave_gate`. A thread that ends all ranks untrained never releases that.
        self._leave_gate = Lock()
        self._is_training = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to signals and to the other ranks until the job is over. The main thread of every rank enters it.

        After an exception the threads go on: this process ends soon, and until then answers signals and other ranks.
        """
        reading = Thread(target=self._read_messages, name="stop-messages", daemon=True)
        with self._signals.listening():
            if not self.peers.is_alone:
                reading.start()
            yield
        self.peers.close()  # that of rank 0 ends the message threads of all
        if not self.peers.is_alone:
            reading.join(timeout=10)

    # What happens at a signal (signal thread).

    def _on_signal(self, number: signal.Signals) -> None:
        """Send the stop to all ranks; if another rank is gone, end this one at once: it waits in a broken collective."""
        lost = self.peers.dead_neighbour()
        if lost is not None:
            with suppress(DistError):  # the store is gone
                if self.peers.is_leave_sent():  # it has left because rank 0 told all to
                    return
            activity = self.peers.activity()
            self.peers.report_activity(activity, has_lost_rank=True)
            if self.report_lost_rank is not None:
                self.report_lost_rank(lost, {self.world.rank: activity} | self.peers.ask_others())
        if self.peers.has_lost_rank:
            exit_at_once(shell_code(-number))
        if self.peers.is_alone:
            self._on_stop(number)
            return
        try:
            self.peers.send_stop(number)
        except DistError:
            exit_at_once(shell_code(-number))  # the others are gone

    # What happens at a message (message thread).

    def _read_messages(self) -> None:
        try:
            for position, message in self.peers.messages():
                match message.kind:
                    case MessageKind.STOP:
                        self._on_stop(signal.Signals(message.number))
                        self._agreement.open(MessageKind.STOP_AGREED, position=position)
                    case MessageKind.SAVE:
                        self._agreement.open(MessageKind.SAVE_AGREED, position=position)
                    case MessageKind.STOP_AGREED | MessageKind.SAVE_AGREED:
                        self._agreement.close(message)
                    case MessageKind.LEAVE:
                        self._end_rank()
        except DistError:
            return  # the store is gone, and soon we are too
        finally:
            self._agreement.give_up()

    def _on_stop(self, number: signal.Signals) -> None:
        """Note that a stop is certain. Rank 0 ends all ranks if it does not train yet: there is nothing to save."""
        self._signal = number
        self._asked.set()
        if not self.world.is_main:
            return
        self._leave_gate.acquire()
        if self._is_training:
            self._leave_gate.release()
            return
        # The gate stays shut: the main thread must not begin to train in the moment until this process ends.
        if self.peers.is_alone:
            self._end_rank()
        self.peers.send_leave()

    def _end_rank(self) -> NoReturn:
        """End this rank before it has trained, rank 0 last."""
        self.peers.leave_together()
        if self.world.is_main:
            self.on_untrained_stop(self.cause())
        self.end_agent()
        exit_at_once(0)  # not a failure: an agent that restarts failed ranks must not restart this one

    # What the main thread asks.

    def begin_training(self, steps_run: int) -> None:
        """Begin to train after so many steps: from now on a stop saves, instead of ending this rank at once."""
        self._agreement.begin(steps_run + 1)
        with self._leave_gate:
            self._is_training = True

    def agree_after(self, steps_run: int) -> Agreed:
        """Return what all have agreed on the step that is taken, and begin the next one unless it was the last: none can change it then.

        `steps_run`: those that a rewind has undone count: the number never falls.
        """
        return Agreed(self.is_asked(), is_save_agreed=False) if self.peers.is_alone else self._agreement.after(steps_run)

    def ask_to_save(self) -> bool:
        """Let all ranks agree on a step soon after which they save, if this is rank 0. Alone in the world: True, after this one."""
        if self.world.is_main and not self.peers.is_alone:
            self._agreement.ask_to_save()
        return self.peers.is_alone

    def is_asked(self) -> bool:
        """Tell whether a stop was asked for, as far as this rank knows: others may not know yet."""
        return self._asked.is_set()

    def cause(self) -> signal.Signals:
        """Return the signal, once a stop is certain; the message of it may still be on its way."""
        self._asked.wait(timeout=60)
        return self._signal or signal.SIGTERM

    def end_agent(self) -> None:
        """End the agent, if it is a user's, after a stop: the last thing that this rank does."""
        if self.ends_agent:
            end_users_agent(lambda: self._signals.was_signalled)


def end_users_agent(was_signalled_here: Callable[[], bool]) -> None:
    """End a user's torchrun after a stop: the last thing that the first rank of each machine does.

    torchrun takes its ranks' exit code 0 for a run that is finished, and waits minutes for those of other machines, which may be gone;
    any other code it takes for a failure, and starts the ranks again. Ended by SIGTERM it exits with 1. If `was_signalled_here`, torchrun
    has passed its own signal on to this process, and ends by itself.
    """
    agent = os.getppid()
    if process_env.local_rank() != 0 or not handles_signal(agent, signal.SIGTERM):
        return
    if process_env.num_nodes() > 1 and not was_signalled_here():
        time.sleep(_AGENT_POLLS_WITHIN_S)  # another machine's torchrun may be the first to see that one has come or gone
    if was_signalled_here():
        return
    note = "stopped, not finished: torchrun now ends by SIGTERM with exit code 1; its messages below are no failure"
    print(note, file=sys.stderr, flush=True)
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGTERM)
