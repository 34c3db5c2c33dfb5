"""The store of the ranks: who serves it, how to join it, and how to wait for a key."""

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from ddp_train.system import torchrun_env
from ddp_train.system.network import WAITING, is_address
from ddp_train.system.process import allow_open_files

_TIMEOUT = timedelta(minutes=10)
_AT_ONCE = 1024
_PATIENCE = _TIMEOUT  # a read is asked again after that: so a server whose machine has lost its power is found to be gone


def join_store() -> dist.Store:
    """Return the store in which the ranks meet, as torchrun's environment says."""
    address, port = torchrun_env.store_address()
    if torchrun_env.rank() == 0 and not torchrun_env.agent_serves_store() and is_address(address):
        with suppress(OSError):  # not an address of this machine: behind a router that translates, say
            return serve_store(address, port)
    store: dist.Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def join_store_again(prefix: str) -> dist.Store:
    """Connect once more to the store that another process of this rank has joined."""
    return dist.PrefixStore(prefix, join_served(*torchrun_env.store_address()))


def wait_for(store: dist.Store, key: str, *, within_s: float | None = None) -> str:
    """Return the value of a key as soon as it is there.

    `within_s`: how long that may take; less than a second counts as one. None: for ever.
    Raises DistError: the store is gone, or the time is over.
    """
    patience = _PATIENCE if within_s is None else timedelta(seconds=max(1.0, within_s))
    while True:
        started = time.monotonic()
        try:
            store.wait([key], patience)
            return str(store.get(key).decode())
        except dist.DistStoreError:
            if within_s is not None or time.monotonic() - started < _PATIENCE.total_seconds() / 2:
                raise  # the read has not waited so long


def add_line(store: dist.Store, key: str, value: Any) -> None:
    """Add a value to the lines of a key, to which all ranks add: whoever reads those of thousands asks once, and not once for each."""
    store.append(key, json.dumps(value) + "\n")  # type: ignore[attr-defined]  # torch's stubs lack it


def lines_of(store: dist.Store, key: str) -> list[Any]:
    """Return what was added to a key so far; [] where nothing was."""
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []


def wait_for_thread(thread: Thread) -> None:
    """Wait, in the main thread, for a thread of this rank that hears from the other ranks."""
    while thread.is_alive():
        time.sleep(0.002)  # not join: the watch on hangs sees in this rank's stack, by this file, that it waits for others


def set_all(store: dist.Store, keys: Sequence[str], value: str) -> None:
    """Give many keys one value, a thousand with each request."""
    for some in (keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE)):
        store.multi_set(some, [value] * len(some))  # type: ignore[attr-defined]  # torch's stubs lack it


def serve_store(address: str, port: int) -> TCPStore:
    """Return a store that is served here, on the interface that has this address; port 0 takes a free one."""
    address = address.strip("[]")
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return serve_store_on(socket.create_server(place, family=family, backlog=WAITING), address)


def serve_store_on(listener: socket.socket, address: str) -> TCPStore:
    """Return a store that is served on a listening socket that was handed over; this process finds it at the address."""
    port = listener.getsockname()[1]
    allow_open_files()  # each rank comes with five connections
    return TCPStore(address, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())


def join_served(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=_TIMEOUT)
