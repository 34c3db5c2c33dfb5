"""What the ranks say to each other through the store, with all of them at it: to meet, to save, to fail, to leave."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed import PrefixStore

from ddp_train.checkpoint.save import PendingSave, write_together
from ddp_train.checkpoint.staging import StagingBuffer
from ddp_train.distributed.store import agree_on_attempt, leave
from ddp_train.distributed.world import World
from ddp_train.rank.peers import MessageKind, Peers
from tests.benchmark.scale.counted_store import CountedStore, all_ranks
from tests.unit.parts import manifest


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What went through the store."""

    part: str
    ranks: int
    requests: int  # of all ranks
    requests_of_main: int  # one after another, each a round trip
    most_of_others: int  # by the busiest of the other ranks
    bytes: int
    seconds: float  # of this process, in which all ranks share a processor


def meeting(size: int) -> Traffic:
    """Let the ranks find each other, as each start of a run begins."""
    store = CountedStore()
    return _traffic("meet", size, store, lambda: all_ranks(size, lambda rank: agree_on_attempt(store, rank, size, continues_from=None)))


def leaving(size: int) -> Traffic:
    """Let the ranks part, as each run ends."""
    store = CountedStore()
    return _traffic("leave", size, store, lambda: all_ranks(size, lambda rank: leave(store, rank, size)))


def saving(size: int) -> Traffic:
    """Let the ranks save: each writes a file in memory, and rank 0 publishes them."""
    store, folder = CountedStore(), Path(tempfile.mkdtemp(dir="/dev/shm"))
    mailbox = PrefixStore("checkpoint", store)
    state = {"model": {"weight": torch.ones(1024)}, "scheduler": {"step": 1}, "window": {"loss": 0.5}}
    staged = StagingBuffer(torch.device("cpu")).copy_state(state, {"random": torch.zeros(5056, dtype=torch.uint8)}, rank=0, size=1)

    def save(rank: int, number: int) -> str | None:
        pending = PendingSave(
            number=number,
            partial=folder / f".partial_{number}",
            staged=staged,
            may_be_infinite=lambda name: False,
            manifest=manifest(number, world_size=size, config_sha256="0" * 64, files={}),
            remove_old=lambda path: None,
            on_progress=lambda: None,
        )
        return write_together(pending, mailbox, world_of(rank, size, store))

    try:
        all_ranks(size, lambda rank: save(rank, 1))
        return _traffic("save", size, store, lambda: all_ranks(size, lambda rank: save(rank, 2)))  # which removes the words of the first
    finally:
        shutil.rmtree(folder)


def failing(size: int) -> Traffic:
    """Let all ranks fail at once, as they do of one mistake: each asks what the others are doing."""
    store = CountedStore()

    def fail(rank: int) -> None:
        peers = Peers.connect(world_of(rank, size, store))
        reader = Thread(target=lambda: list(peers.messages()))
        peers.report_activity("failed with ValueError, forward, model.py:12 in forward")
        reader.start()
        peers.ask_others()
        if not store.add("failed", 1) < size:
            peers.send(MessageKind.CLOSED)  # no agent kills a rank here
        reader.join()

    return _traffic("fail together", size, store, lambda: all_ranks(size, fail))


class _Known(World):
    """A world in which all are on machines of eight, and a gather costs nothing here."""

    def gather(self, value: Any) -> list[Any]:
        return [(("node", 0, rank // 8), 0) for rank in range(self.size)] if isinstance(value, tuple) else [value] * self.size


def world_of(rank: int, size: int, store: CountedStore) -> World:
    """Return a rank's world, on machines of eight."""
    return _Known(rank=rank, size=size, local_rank=rank % 8, local_size=min(8, size), device=torch.device("cpu"), store=store)


def _traffic(part: str, size: int, store: CountedStore, act: Callable[[], Any]) -> Traffic:
    store.requests.clear()
    store.bytes.clear()
    started = time.perf_counter()
    act()
    seconds = time.perf_counter() - started
    return Traffic(
        part=part,
        ranks=size,
        requests=store.requests.total(),
        requests_of_main=store.requests[0],
        most_of_others=max(store.requests[rank] for rank in range(1, size)),
        bytes=store.bytes.total(),
        seconds=seconds,
    )
