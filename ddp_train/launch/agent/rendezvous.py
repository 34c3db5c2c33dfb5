"""Where an agent of ours listens: for a run on one machine on its loopback interface, else on the interface that the endpoint names.

torchrun's own rendezvous (`--standalone` too) serves its store on every interface of the machine, and unpickles what anybody writes there:
whoever reaches the port runs code in the agent. `_Loopback` listens on 127.0.0.1 alone, unpickles nothing, and gives each attempt a store
of its own. Several machines need torch's; an endpoint that is an address, and no name, is then the only one that is listened on.
"""

from __future__ import annotations

from contextlib import suppress

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ddp_train.config.cluster import LOOPBACK, ON_ADDRESS
from ddp_train.distributed.store import serve_store


def register() -> None:
    """Make `--rdzv-backend=loopback` and `c10d_on_address` known to torchrun in this process."""
    rendezvous_handler_registry.register(LOOPBACK, _Loopback)
    rendezvous_handler_registry.register(ON_ADDRESS, _c10d_on_address)


def _c10d_on_address(parameters: RendezvousParameters) -> RendezvousHandler:
    """Serve the store of torch's c10d rendezvous on one address, where this machine is the one to serve it, and connect to it."""
    host, _, port = parameters.endpoint.rpartition(":")
    if parameters.get_as_bool("is_host", True):
        with suppress(OSError):  # another machine's address, or another agent here serves it already
            _served.append(serve_store(host, int(port)))
            parameters.config["is_host"] = False
    _, store = c10d_rendezvous_backend.create_backend(parameters)
    return dynamic_rendezvous.create_handler(store, _OnAddress(store, parameters.run_id), parameters)


class _OnAddress(c10d_rendezvous_backend.C10dRendezvousBackend):
    @property
    def name(self) -> str:
        return ON_ADDRESS  # torch compares it with what was asked for


_served: list[TCPStore] = []  # as long as this process lives


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
