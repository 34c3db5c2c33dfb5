"""The line between the ranks of a job: messages that every rank gets in the same order, who is gone, and what each rank is doing.

Messages go through the store where the ranks met. A thread on every rank reads them, whatever its main thread does: so a rank can be asked
what it is doing while it waits in a collective for one that has failed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import count
from threading import main_thread
from typing import NamedTuple

from torch.distributed import DistError, HashStore, PrefixStore, Store

from ddp_train.distributed.store import add_line, lines_of, wait_for
from ddp_train.distributed.world import World
from ddp_train.run_folder import failure
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import is_alive
from ddp_train.system.stack_dump import describe_stack

logger = logging.getLogger(__name__)

REPLIES_S = 1.0  # how long a rank waits for the replies of the others: some may be gone

_POLL_S = 0.02
_FIRST_POLL_S = 0.001
_LATE_POLL_S = 0.25  # of the ranks that do not ask themselves, of which there may be thousands
_RECORDS_S = 0.1  # within this time the rank that has heard the others records its failure


class Neighbour(NamedTuple):
    """Another rank on this machine."""

    rank: int
    pid: int


class MessageKind(StrEnum):
    """What a message says. Where the comment names a signal or a step, the message has its number; else 0."""

    STOP = "stop"  # a rank is asked to stop: by which signal
    SAVE = "save"
    STOP_AGREED = "agreed stop"  # after which step all ranks stop
    SAVE_AGREED = "agreed save"  # after which step all save
    LEAVE = "leave"
    ASK = "ask"  # what each rank is doing
    CLOSED = "closed"  # no message follows


class RankMessage(NamedTuple):
    """What one rank says to all."""

    kind: MessageKind
    number: int


class Peers:
    """This rank's end of the line; `connect` makes it."""

    def __init__(self, world: World, store: Store, reading_store: Store, neighbours: Sequence[Neighbour]) -> None:
        self._world = world
        self._store = store
        self._reading_store = reading_store  # a connection serves one request at a time, and reading waits
        self._neighbours = neighbours  # of the same agent, which sees how they end
        self.is_alone = world.size == 1
        self.activity: Callable[[], str] = _main_thread_activity  # or what this rank has reported
        self.has_lost_rank = False  # another rank is gone, and this one only waits to be ended
        self._is_asking = False  # what the others are doing

    @classmethod
    def connect(cls, world: World) -> Peers:
        """Open this rank's end. The main thread of every rank calls it, once for each job. Collective."""
        if world.size == 1:
            return cls(world, HashStore(), HashStore(), [])
        store = _connection(world)
        store.set(f"pid/{world.rank}", f"{os.getpid()}")
        first = world.rank - world.local_rank  # torchrun counts a machine's ranks one after another
        ranks = range(first, first + world.local_size)
        pids = map(int, store.multi_get([f"pid/{rank}" for rank in ranks]))
        neighbours = [Neighbour(rank, pid) for rank, pid in zip(ranks, pids, strict=True) if rank != world.rank]
        return cls(world, store, _connection(world), neighbours)

    def send(self, kind: MessageKind, number: int = 0) -> None:
        """Send a message to every rank, this one too."""
        self._store.set(f"message/{self._store.add('messages', 1)}", f"{kind} {number}")

    def send_stop(self, number: int) -> None:
        """Ask every rank to stop, by a signal's number, unless a rank has asked before."""
        if self._store.add("signals", 1) == 1:
            self.send(MessageKind.STOP, number)

    def send_leave(self) -> None:
        """Let every rank end now."""
        self._store.set("leaving", "")
        self.send(MessageKind.LEAVE)

    def is_leave_sent(self) -> bool:
        return self._store.check(["leaving"])

    def answer(self, position: int, begun_step: int) -> list[int] | None:
        """Answer a message with the step that this rank has begun; return what all have answered to the rank that is last, else None."""
        place = f"begun/{position}"
        self._store.set(f"{place}/{self._world.rank}", f"{begun_step}")
        if self._store.add(place, 1) < self._world.size:
            return None
        return [int(step) for step in self._store.multi_get([f"{place}/{rank}" for rank in range(self._world.size)])]

    def messages(self) -> Iterator[tuple[int, RankMessage]]:
        """Give each message with its position as it comes, until the line is closed. Answers `ASK` itself. For one thread.

        Raises DistError: the store is gone.
        """
        for position in count(1):
            kind, _, value = wait_for(self._reading_store, f"message/{position}").rpartition(" ")
            message = RankMessage(MessageKind(kind), int(value))
            if message.kind is MessageKind.CLOSED:
                return
            if message.kind is not MessageKind.ASK:
                yield position, message
            elif not self._is_asking:
                add_line(self._store, "doing", [self._world.rank, self.activity()])
                self._store.add("replies", 1)

    def close(self) -> None:
        """Close the line. Every rank may call it; rank 0 closes it for all."""
        if self._world.is_main:
            self.send(MessageKind.CLOSED)

    def report_activity(self, activity: str, *, has_lost_rank: bool = False) -> None:
        """Answer this, from now on, when another rank asks what this one is doing.

        If it `has_lost_rank`, this rank only waits to be ended: the next signal ends it.
        """
        self.activity = lambda: activity  # before anything that takes its time: others may be asking already
        self.has_lost_rank = has_lost_rank
        logger.info(failure.ACTIVITY, os.getpid(), activity)

    def ask_others(self) -> dict[int, str]:
        """Return the activities of the other ranks that have not ended. Waits `REPLIES_S` at most.

        Only the first rank that calls this asks: if thousands fail of one mistake, each would have to answer each (docs/scale.md). Later
        ones get {}, after the time in which the first one records what it has heard.
        """
        if self.is_alone:
            return {}
        gone = [neighbour.rank for neighbour in self._neighbours if not is_alive(neighbour.pid)]
        others = [rank for rank in range(self._world.size) if rank not in (self._world.rank, *gone)]
        replies: dict[int, str] = {}
        try:
            if self._store.add("asked", 1) > 1:
                # Not by the store's own wait: the reading thread answers over this connection.
                wait_until(lambda: self._store.check(["heard"]), within_s=REPLIES_S, every_s=_LATE_POLL_S, first_s=_POLL_S)
                time.sleep(_RECORDS_S)
                return {}
            self._is_asking = True
            self.send(MessageKind.ASK)
            wait_until(lambda: self._store.add("replies", 0) >= len(others), within_s=REPLIES_S, every_s=_POLL_S, first_s=_FIRST_POLL_S)
            replies = dict(lines_of(self._store, "doing"))
            self._store.set("heard", "")
        except DistError:
            logger.info("the other ranks cannot be reached: the store is gone")
        return {rank: replies.get(rank, "gave no answer") for rank in others}

    def dead_neighbour(self) -> Neighbour | None:
        return next((neighbour for neighbour in self._neighbours if not is_alive(neighbour.pid)), None)

    def leave_together(self) -> None:
        """Say that this rank ends now. Rank 0 waits for the others, because the store may end with it."""
        if not self._world.is_main:
            self._store.add("left", 1)
        else:
            wait_until(lambda: self._store.add("left", 0) >= self._world.size - 1, within_s=REPLIES_S, every_s=_POLL_S)


def _main_thread_activity() -> str:
    return describe_stack(traceback.extract_stack(sys._current_frames()[main_thread().ident or 0]))


def _connection(world: World) -> Store:
    assert world.store is not None
    return PrefixStore("stop", world.store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
