"""The store of the ranks: who serves it, how to join it, and how to wait for a key."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore

from ddp_train.system import torchrun_env
from ddp_train.system.network import is_address

_TIMEOUT = timedelta(minutes=10)


def join_store() -> dist.Store:
    """Return the store in which the ranks meet, as torchrun's environment says."""
    address = torchrun_env.store_host()
    if torchrun_env.rank() == 0 and not torchrun_env.agent_serves_store() and is_address(address):
        with suppress(OSError):  # not an address of this machine: behind a router that translates, say
            return serve_store(address, torchrun_env.store_port())
    store: dist.Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def join_store_again(prefix: str) -> dist.Store:
    """Connect once more to the store that another process of this rank has joined."""
    address, port = torchrun_env.store_host(), torchrun_env.store_port()
    return dist.PrefixStore(prefix, dist.TCPStore(address, port, is_master=False, timeout=_TIMEOUT))


def wait_for(store: dist.Store, key: str) -> str:
    """Return the value of a key as soon as it is there, however long that takes.

    Raises:
        DistError: the store is gone.
    """
    while True:
        try:
            return str(store.get(key).decode())
        except dist.DistError as error:
            if "timeout" not in str(error).lower():
                raise


def serve_store(address: str, port: int) -> TCPStore:
    """Return a store that is served here, on one interface.

    Args:
        address: of the interface.
        port: 0 takes a free one.
    """
    address = address.strip("[]")
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
