"""Where the threads of one save leave messages for each other: the store of the ranks, over connections of the threads' own."""

from __future__ import annotations

import time
from threading import Thread

from torch.distributed import HashStore, PrefixStore, Store

from ddp_train.distributed.store import wait_for
from ddp_train.distributed.world import World

POLL_S = 0.002


class Mailbox:
    """Messages by key. Every rank makes one; one thread at a time uses it.

    Args:
        name: unique in the world's store.
    """

    def __init__(self, world: World, name: str) -> None:
        store: Store = HashStore()  # of a world of one
        if world.size > 1:
            assert world.store is not None
            store = world.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store = PrefixStore(f"checkpoint/{name}", store)

    def put(self, key: str, message: str) -> None:
        """Leave a message.

        Raises:
            DistError: the store is gone.
        """
        self._store.set(key, message)

    def get(self, key: str) -> str:
        """Return a message as soon as it is there, however long that takes.

        Raises:
            DistError: the store is gone.
        """
        return wait_for(self._store, key)

    def wait_for(self, thread: Thread) -> None:
        """Wait, in the main thread, for the threads of the other ranks, through the one of this rank that hears from them."""
        while thread.is_alive():
            time.sleep(POLL_S)  # not join: the watch on hangs sees in this rank's stack for whom it waits

    def remove(self, key: str) -> None:
        """Take a message away that everyone has read."""
        self._store.delete_key(key)
