"""Where an agent of ours listens: for a run on one machine on its loopback interface, else on the interface that the endpoint names.

torchrun's own rendezvous (`--standalone` too) serves its store on every interface of the machine, and unpickles what anybody writes there:
whoever reaches the port runs code in the agent. `Loopback` listens on 127.0.0.1 alone, unpickles nothing, and gives each attempt a store of
its own. Several machines need torch's; an endpoint that is an address, and no name, is then the only one that is listened on.
"""

from __future__ import annotations

import uuid
from contextlib import suppress

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)

from ddp_train.config.cluster import LOOPBACK, ON_ADDRESS
from ddp_train.distributed.store import serve_store


def register() -> None:
    """Make `--rdzv-backend=loopback` and `c10d_on_address` known to torchrun in this process."""
    rendezvous_handler_registry.register(LOOPBACK, Loopback)
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
