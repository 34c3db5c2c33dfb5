"""Three ranks that are threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.distributed import PrefixStore, TCPStore

from ddp_train.distributed.world import World
from ddp_train.rank.peers import Peers


def three_worlds() -> list[World]:
    """Return the worlds of three ranks of one machine that share a store and have nothing else to talk through."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    return [World(rank=rank, size=3, local_rank=rank, local_size=3, device=torch.device("cpu"), store=store) for rank in range(3)]


def three_ends(worlds: list[World], *, name: str = "") -> list[Peers]:
    """Return the ends of their line, which are made together.

    Args:
        name: of the line: a store may have several, one after another.
    """
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(lambda world: Peers.connect(replace(world, store=PrefixStore(f"line_{name}", world.store))), worlds))
