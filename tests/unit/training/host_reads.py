"""What makes a host wait for its GPU, counted without one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountsHostReads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default):
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))
