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
from collections.abc import Callable, Iterator
from itertools import count
from threading import main_thread

from torch.distributed import DistError, PrefixStore, Store

from ddp_train.distributed.store import add_line, lines_of, wait_for
from ddp_train.distributed.world import World
from ddp_train.run_folder import failure
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import is_alive

logger = logging.getLogger(__name__)

ANSWERS_S = 1.0  # how long a rank waits for the answers of the others: some may be gone

_POLL_S, _FIRST_POLL_S = 0.02, 0.001
_LATER_S = 0.25  # between two looks of the ranks that do not ask, of which there may be thousands
_TELLS_S = 0.1  # within which the rank that has heard the others has written its report


class Peers:
    """This rank's end of the line. The main thread of every rank makes one for each job. Collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asks = False  # what the others are doing
        self.doing: Callable[[], str] = _what_the_main_thread_does  # or what this rank has reported
        self.is_lost = False  # another rank is gone, and this one only waits to be ended
        self._neighbours: dict[int, int] = {}  # rank -> pid, of those that we can see, and whose agent, which is ours, says how they ended
        self.is_alone = world.size == 1
        if not self.is_alone:  # a connection serves one request at a time, and reading waits on its own
            self.store, self._line = _connect(world), _connect(world)
            self.store.set(f"pid/{world.rank}", f"{os.getpid()}")
            first = world.rank - world.local_rank  # torchrun counts a machine's ranks one after another
            ranks = range(first, first + world.local_size)
            pids = map(int, self.store.multi_get([f"pid/{rank}" for rank in ranks]))
            self._neighbours = {rank: pid for rank, pid in zip(ranks, pids, strict=True) if rank != world.rank}

    def send(self, message: str) -> None:
        """Send a message to every rank, this one too."""
        self.store.set(f"message/{self.store.add('messages', 1)}", message)

    def messages(self) -> Iterator[tuple[int, str]]:
        """Give each message with its number as it comes, until the line is closed. Answers `ask` itself. For one thread.

        Raises DistError: the store is gone.
        """
        for number in count(1):
            message = wait_for(self._line, f"message/{number}")
            if message == "closed":
                return
            if message == "ask" and self._asks:
                continue
            if message == "ask":
                add_line(self.store, "doing", [self._world.rank, self.doing()])
                self.store.add("answers", 1)
            else:
                yield number, message

    def close(self) -> None:
        """Close the line. Every rank may call it; rank 0 closes it for all."""
        if not self.is_alone and self._world.is_main:
            self.send("closed")

    def report_activity(self, doing: Callable[[], str], *, is_lost: bool = False) -> None:
        """Answer this, from now on, when another rank asks what this one is doing.

        Where `is_lost`, another rank is gone, and this one only waits to be ended: the next signal ends it.
        """
        self.doing, self.is_lost = doing, is_lost  # before anything that takes its time: others may be asking already
        logger.info(f"{failure.WAS}%s", os.getpid(), doing())

    def ask_others(self) -> dict[int, str]:
        """Return what the other ranks are doing, by rank, those left out that have ended. Waits `ANSWERS_S` at most.

        One rank asks for all. Where thousands fail of one mistake, each would have to answer each (docs/scale.md): whoever comes later
        gets {}, after a while in which the first may tell what it has heard.
        """
        if self.is_alone:
            return {}
        gone = [rank for rank, pid in self._neighbours.items() if not is_alive(pid)]
        others = [rank for rank in range(self._world.size) if rank not in (self._world.rank, *gone)]
        answers: dict[int, str] = {}
        try:
            if self.store.add("asked", 1) > 1:
                # Not by the store's own wait: the reading thread answers over this connection.
                wait_until(lambda: self.store.check(["heard"]), within_s=ANSWERS_S, every_s=_LATER_S, first_s=_POLL_S)
                time.sleep(_TELLS_S)
                return {}
            self._asks = True
            self.send("ask")
            wait_until(lambda: self.store.add("answers", 0) >= len(others), within_s=ANSWERS_S, every_s=_POLL_S, first_s=_FIRST_POLL_S)
            answers = dict(lines_of(self.store, "doing"))
            self.store.set("heard", "")
        except DistError:
            logger.info("the other ranks cannot be asked: the store is gone")
        return {rank: answers.get(rank, "gave no answer") for rank in others}

    def dead_neighbour(self) -> tuple[int, int] | None:
        """Return rank and pid of a rank on this machine that has ended, if there is one."""
        return next(((rank, pid) for rank, pid in self._neighbours.items() if not is_alive(pid)), None)

    def leave_together(self) -> None:
        """Say that this rank ends now. Rank 0 waits for the others, because the store may end with it."""
        if not self._world.is_main:
            self.store.add("left", 1)
        elif not self.is_alone:
            wait_until(lambda: self.store.add("left", 0) >= self._world.size - 1, within_s=ANSWERS_S, every_s=_POLL_S)


def _what_the_main_thread_does() -> str:
    return failure.describe(traceback.extract_stack(sys._current_frames()[main_thread().ident or 0]))


def _connect(world: World) -> Store:
    assert world.store is not None
    return PrefixStore("stop", world.store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
