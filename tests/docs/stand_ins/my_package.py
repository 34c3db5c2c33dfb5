"""What pages call the reader's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MyModel(nn.Module):
    """Takes flat images."""

    def __init__(self, image_shape: Sequence[int] = (1, 16, 16), num_classes: int = 10, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), *(nn.LazyLinear(32) for _ in range(depth)), nn.LazyLinear(num_classes))
        self.layers(torch.zeros(1, *image_shape))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        found: Tensor = self.layers(images_BCHW)
        return found
