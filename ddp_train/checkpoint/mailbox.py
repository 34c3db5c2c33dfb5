"""Where the threads of one save leave messages for each other: the store of the ranks, over connections of the threads' own."""

from __future__ import annotations

import time
from threading import Thread

from torch.distributed import HashStore, PrefixStore, Store

from ddp_train.distributed.world import World

POLL_S = 0.002


def open_mailbox(world: World, name: str) -> Store:
    """Return a store for messages. Every rank opens one; one thread at a time uses it.

    Args:
        name: unique in the world's store.
    """
    store: Store = HashStore()  # of a world of one
    if world.size > 1:
        assert world.store is not None
        store = world.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return PrefixStore(f"checkpoint/{name}", store)


def wait_for_thread(thread: Thread) -> None:
    """Wait, in the main thread, for the threads of the other ranks, through the one of this rank that hears from them."""
    while thread.is_alive():
        time.sleep(POLL_S)  # not join: the watch on hangs sees in this rank's stack for whom it waits
