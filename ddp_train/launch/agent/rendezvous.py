"""Where an agent of ours meets the others: it is told, and asks nobody.

torchrun's own rendezvous (`--standalone` too) serves its store on every interface of the machine, and unpickles what anybody writes there:
whoever reaches the port runs code in the agent. What an agent of ours is told is who it is and where the store is. The store unpickles
nothing, and listens on one interface where one is enough.
"""

from __future__ import annotations

import socket

from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ddp_train.config.cluster import LOOPBACK, ROUND
from ddp_train.distributed.store import join_served, serve_store, serve_store_on


def register() -> None:
    """Make `--rdzv-backend=loopback` and `round` known to torchrun in this process."""
    rendezvous_handler_registry.register(LOOPBACK, _Loopback)
    rendezvous_handler_registry.register(ROUND, _Round)


class _Loopback(StaticTCPRendezvous):
    """One agent that meets itself: nobody comes, and nobody else ends it. Its newest store stays to the end of the process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new, empty store, to which the ranks connect: none of them serves one."""
        self._store = served = serve_store("127.0.0.1", 0)
        return RendezvousInfo(served, 0, 1, RendezvousStoreInfo("127.0.0.1", served.port))

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return LOOPBACK


class _Round(StaticTCPRendezvous):
    """The agents of one start of all ranks (`node/rounds.py`). The first one serves the store, at a socket that its parent listens on."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, _, port = parameters.endpoint.rpartition(":")
        rank, size = int(parameters.config["rank"]), parameters.max_nodes
        super().__init__(host.strip("[]"), int(port), rank=rank, world_size=size, run_id=parameters.run_id, timeout=0)
        self._listener = int(parameters.config["listener"])

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of this round, which is empty. It is asked for once."""
        if self.rank == 0:
            store = serve_store_on(socket.socket(fileno=self._listener), self.master_addr)
        else:
            store = join_served(self.master_addr, self.master_port)
        self._store = store
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port))

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return ROUND
