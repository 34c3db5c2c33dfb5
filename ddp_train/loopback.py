"""The rendezvous of a run on one machine: nothing to agree on, and nothing that another machine could talk to.

torchrun's own (`--standalone`) serves its store on every interface of the machine, and unpickles what anybody writes there: whoever reaches
the port runs code in the agent. This one listens on 127.0.0.1 alone, unpickles nothing, and gives each attempt a store of its own.
"""

from __future__ import annotations

import socket
import uuid
from datetime import timedelta

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from ddp_train.cluster import LOOPBACK

_TIMEOUT = timedelta(minutes=10)


def register() -> None:
    """Make `--rdzv-backend=loopback` known to torchrun in this process."""
    rendezvous_handler_registry.register(LOOPBACK, Loopback)


def serve_store(address: str, port: int, *, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Return a store that is served here, on one interface.

    Args:
        address: of the interface.
        port: 0 takes a free one.
    """
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
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach())


class Loopback(RendezvousHandler):
    """One agent that meets itself."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._id = parameters.run_id or uuid.uuid4().hex
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet in this store: they connect, and none of them serves one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new, empty store."""
        self._store = serve_store("127.0.0.1", 0)
        store: Store = self._store
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", self._store.port))

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return LOOPBACK

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._id

    def is_closed(self) -> bool:
        """Return False: whoever ends the agent ends it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else is here to be told."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine comes."""
        return 0

    def shutdown(self) -> bool:
        """Leave the store to the end of the process: ranks that end may still use it."""
        return True
