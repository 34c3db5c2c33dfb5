"""A small convolutional network for waves."""

from __future__ import annotations

from torch import Tensor, nn


class WaveNet(nn.Module):
    """Two convolutions and a linear head.

    Args:
        num_classes: how many there are.
        width: channels of the first convolution.
    """

    def __init__(self, num_classes: int, *, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 7, stride=2, padding=3), nn.ReLU(), nn.Conv1d(width, 2 * width, 5, stride=2, padding=2), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, waves: Tensor) -> Tensor:
        """Return logits, shape [B, 1, length] -> [B, num_classes]."""
        logits: Tensor = self.head(self.features(waves).amax(-1))
        return logits
