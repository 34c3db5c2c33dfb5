"""Writing: a copy on the main thread, and the rest on a thread of its own while training goes on.

    every rank, main thread    copies its share of the state into a buffer, starts the thread, and trains on
    rank 0's thread            makes .partial_step_00001000_NONCE
    every rank's thread        writes its file, hashes it meanwhile, lets it reach the disk, and tells rank 0
    rank 0's thread            writes manifest.json and COMPLETE, renames the folder, removes old ones, and tells all how it ended

The threads talk through the store: a thread must not use the process group's collectives. A checkpoint that could not be written is
said at once and its rest removed; the ones before it are not touched, and training goes on.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from ddp_train.checkpoint.joint_save import POLL_S, SaveOrder, open_mailbox, wait_for_thread, write_together
from ddp_train.checkpoint.staging import StagingBuffer
from ddp_train.checkpoint.verify import name_of
from ddp_train.distributed.world import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint is made of, on one rank. Tensors are on any device, and are copied when it is saved."""

    step: int
    shared: Mapping[str, Any]  # the same on every rank: each writes a share
    own: Mapping[str, Any]  # this rank's alone
    may_be_infinite: Callable[[str], bool]  # of the tensors' names in `shared`: whether infinity is no sign of lost weights


@dataclass
class Saver:
    """Saves one run's checkpoints, one at a time. Every rank makes one. Collective."""

    folder: Path  # where the checkpoints lie, on a file system that all ranks share
    world: World
    _: KW_ONLY
    config_hash: str  # for the manifest
    run: str | None = None  # likewise: the run's number
    asynchronous: bool = True  # False: `save` returns when the checkpoint is there, or has failed
    remove_old: Callable[[Path], None] = lambda folder: None  # called with the folder when a new one is there, on rank 0, in a thread
    on_progress: Callable[[], None] = lambda: None  # called while this rank waits for a disk that is slow, but goes on writing

    def __post_init__(self) -> None:
        self._buffer = StagingBuffer(self.world.device)
        self._nonce: str = self.world.from_main(secrets.token_hex(4))
        self._mailbox = open_mailbox(self.world, self._nonce)
        self._count = self._parts_written = 0
        self._under_way: tuple[Thread, SaveOrder] | None = None
        self._problem = ""
        self._error: Exception | None = None

    def make_room(self, num_bytes: int) -> None:
        """Begin to make the memory that this rank's part of about so many bytes is copied to, while training begins."""
        self._buffer.make_room(num_bytes)

    def save(self, content: Content, *, facts: Mapping[str, Any] | None = None) -> None:
        """Save a state. What changes after this returns is not in the checkpoint. Waits for the save before it. Collective.

        Args:
            facts: more for the manifest (metrics, say), the same on all ranks.

        Raises:
            StateError: a checkpoint cannot hold the state.
        """
        self.finish()
        origin = {"step": content.step, "run": self.run}
        staged = self._buffer.copy_state(content.shared, content.own, rank=self.world.rank, size=self.world.size, origin=origin)
        self._count += 1
        order = SaveOrder(
            number=self._count,
            folder=self.folder,
            partial=self.folder / f".partial_{name_of(content.step)}_{self._nonce}_{self._count}",
            step=content.step,
            staged=staged,
            may_be_infinite=content.may_be_infinite,
            facts={"run": self.run, "config_sha256": self.config_hash, "facts": dict(facts or {})},
            remove_old=self.remove_old,
            on_progress=self._count_part,
        )
        thread = Thread(target=self._write, args=(order,), name="checkpoint", daemon=True)
        self._under_way = thread, order
        thread.start()
        if not self.asynchronous:
            self.finish()

    def finish(self) -> str:
        """Wait for the save that is under way; return what went wrong with the last one, the same on all ranks, or "".

        Raises:
            DistError: the store in which the ranks meet is gone, and with it another rank, or the agent.
        """
        if self._under_way is not None:
            thread, order = self._under_way
            seen = self._parts_written
            while not order.is_written.is_set():
                time.sleep(POLL_S)  # here a rank waits for its own disk; the watch on hangs sees it in the stack
                if self._parts_written != seen:
                    seen = self._parts_written
                    self.on_progress()
            wait_for_thread(thread)
            self._under_way = None
        if self._error is not None:
            raise self._error
        return self._problem

    def _count_part(self) -> None:
        self._parts_written += 1

    def _write(self, order: SaveOrder) -> None:
        """Write, and say so when it has failed (a thread)."""
        began = time.monotonic()
        try:
            self._problem = write_together(order, self._mailbox, self.world)
        except Exception as error:
            logger.exception("the checkpoint of step %d was not saved", order.step)
            self._error = error  # of the main thread too, which knows what to make of a lost store
            return
        finally:
            order.is_written.set()
        if not self._problem:
            logger.info("the checkpoint of step %d is written, in %.2f s", order.step, time.monotonic() - began)
            return
        message = f"the checkpoint of step {order.step} was NOT saved, earlier ones are untouched. {self._problem}"
        logger.error(message)
        if self.world.is_main:
            print(message, flush=True)
