"""A model for `soak.py`, which ranks of a run do to themselves what a file orders: faults that cannot be done to a process from outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train.model.convnet import ConvNet
from ddp_train.rank.fault_injection import ON_ITSELF


def give(order: str, *, rank: int, folder: Path) -> None:
    """Order a rank of the run that stands in `folder` to do one of `ON_ITSELF`, in its next training forward."""
    (folder / f".order_{rank}").write_text(order)
    (folder / f".order_{rank}").rename(folder / f"order_{rank}")


class Obeying(ConvNet):
    """A small convolutional network that looks for an order before each training forward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._order = Path(f"order_{os.environ['RANK']}")

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self._order.exists():
            order = self._order.read_text()
            self._order.unlink()  # once: the rank that is started again must not do it, too
            ON_ITSELF[order]()
        return super().forward(images)
