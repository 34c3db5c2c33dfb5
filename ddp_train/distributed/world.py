"""The process group, as the rest of the code sees it: one `World` with a few collectives.

World size 1 is no special case for the callers: every collective then returns what it was given.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_train.errors import UserError
from ddp_train.system import process_env
from ddp_train.system.network import address_towards, interface_of

_T = TypeVar("_T")
_TIMEOUT = timedelta(minutes=10)
_LOOPBACK = "lo"  # Linux has no other name for it
_MOST_CONNECTED = 512
"""So many ranks connect with each other at the start: a way between two machines that is shut is found then, and not hours later. Of more,
each connects with those that it talks to: all connections, and what is read of the store for them, grow with the square (docs/scale.md)."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store | None = None  # None: a world of one without a rendezvous
    has_group: bool = False  # `open_world` has opened a process group; for one rank in tests alone

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0. Guards file writing only; a collective never stands under it."""
        return self.rank == 0

    def print(self, *lines: str) -> None:
        """Print lines, on rank 0 alone."""
        if self.is_main and lines:
            print(*lines, sep="\n", flush=True)

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce by addition, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def lowest(self, values: Tensor) -> Tensor:
        """All-reduce by the smaller of two values, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return values

    def are_alike(self, numbers: Tensor) -> Tensor:
        """Tell, number by number, whether all ranks have the same: bool, on the CPU. As cheap for thousands as for two. Collective.

        `numbers`: int64, shape [numbers], the same shape on all ranks.
        """
        if not len(numbers):
            return torch.ones(0, dtype=torch.bool)
        smallest, inverted_largest = self.lowest(torch.cat([numbers, ~numbers])).cpu().chunk(2)
        return smallest == ~inverted_largest

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with rank 0's, in place. Collective."""
        for tensor in tensors:
            self.copy_from(0, tensor)

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        """Overwrite a tensor with that of one rank, in place. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, src=rank)

    def gather_rows(self, values: Tensor) -> Tensor:
        """Return every rank's tensor, which has the same shape on all, stacked by rank. Collective."""
        if self.size == 1:
            return values[None]
        rows = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(rows, values)
        return torch.stack(rows)

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank, on every rank. Pickles: not for the hot path. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_to_main(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank, on rank 0; [] on the others, which need no room for them. Pickles. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, values if self.is_main else None)
        return values

    def from_main(self, make: Callable[[], _T]) -> _T:
        """Return on every rank what `make` returns on rank 0, which alone calls it. Pickles: not for the hot path. Collective.

        If it raises, the other ranks wait here until the error of rank 0 ends the attempt.
        """
        box: list[Any] = [make() if self.is_main else None]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        value: _T = box[0]
        return value

    def each_from_main(self, make: Callable[[], Sequence[_T]]) -> _T:
        """Return to each rank its own one of the values that `make` returns by rank, on rank 0 (`from_main`). Pickles. Collective."""
        values = list(make()) if self.is_main else None
        box: list[Any] = values or [None]
        if self.size > 1:
            dist.scatter_object_list(box, values, src=0)
        value: _T = box[0]
        return value

    def first_of(self, text: str | None) -> str | None:
        """Return, on every rank, the text of the first rank that has one; None: none has. Two messages more where one has. Collective."""
        if self.size == 1:
            return text
        first = int(self.lowest(torch.tensor([self.size if text is None else self.rank])))
        if first == self.size:
            return None
        box = [text]
        dist.broadcast_object_list(box, src=first)
        return box[0]

    def barrier(self) -> None:
        self.sum(torch.zeros(1))  # on CPU: dist.barrier would use, and guess, a GPU

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let rank 0 pass the block before the others enter it: it downloads, they find the files. Collective."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def alone(device: str = "cpu") -> World:
    """Return a world of one process, without a process group."""
    return World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device(device))


def open_world(store: dist.Store, rank: int, size: int, *, device: str, timeout: timedelta = _TIMEOUT) -> World:
    """Open the process group and take this rank's device. Collective.

    Args:
        device: `cpu` or `cuda`; on `cuda` tensors on CPU can be reduced too (gloo beside NCCL).
        timeout: of every collective; the rank that gives up is not the one to blame.

    Raises UserError: this machine has fewer GPUs than processes.
    """
    local_rank, local_size = process_env.local_rank(), process_env.local_world_size()
    is_shared = process_env.shares_gpu()
    if device == "cuda" and torch.cuda.device_count() < (1 if is_shared else local_size):
        happened = f"{socket.gethostname()} runs {local_size} processes, but torch sees {torch.cuda.device_count()} GPUs"
        expected = "one GPU for each process"
        raise UserError(key="cluster.processes_per_node", happened=happened, expected=expected, fix="fewer processes, or cluster=cpu")
    torch_device = torch.device("cuda", 0 if is_shared else local_rank) if device == "cuda" else torch.device("cpu")
    has_group = size > 1 or os.environ.get(process_env.ONE_GPU) == "group"
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    if local_size == size:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # unless the environment names another interface
            os.environ.setdefault(variable, _LOOPBACK)
    else:
        _reach_out(store)
    if size > _MOST_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # read when the group opens
    if has_group:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" and not is_shared else "gloo",
            store=dist.PrefixStore("process_group", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=torch_device if device == "cuda" and not is_shared else None,
        )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=torch_device, store=store, has_group=has_group)


def _reach_out(store: dist.Store) -> None:
    """Let gloo talk through the interface on the route to the other machines, unless the environment names another one. Collective.

    gloo would take the address that this machine's own name has, which to itself may be 127.0.1.1. NCCL does not go by names.

    `store`: where the machines tell each other their addresses: the one that MASTER_ADDR names has no route to it.
    """
    node, nodes = process_env.node_rank(), process_env.num_nodes()
    address = address_towards(process_env.store_address()[0])
    if process_env.local_rank() == 0:
        store.set(f"address/{node}", address)  # also where the environment names an interface: others wait for it
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    others = ((node + distance) % nodes for distance in range(1, nodes))
    while not address and (other := next(others, None)) is not None:
        if other_address := store.get(f"address/{other}").decode():
            address = address_towards(other_address)
    # Without any address all agents are on this machine.
    interface = interface_of(address) if address else _LOOPBACK
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
