"""Three ranks that are threads of this process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import TCPStore

from ddp_train.distributed.world import World


class _Together(World):
    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def three_worlds() -> list[World]:
    """Return the worlds of three ranks that share a store and have nothing else to talk through."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    return [_Together(rank=rank, size=3, local_rank=rank, local_size=3, device=torch.device("cpu"), store=store) for rank in range(3)]
