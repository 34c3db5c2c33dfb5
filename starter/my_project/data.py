"""Noisy waves of three shapes, made from their index: no file, no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Waves(Dataset[tuple[Tensor, int]]):
    """Sample i is a wave of random frequency and phase, shape [1, length], and the number of its shape.

    Args:
        num_samples: how many.
        length: points of each wave.
        noise: standard deviation of the noise; waves lie between -1 and 1.
        seed: of all random numbers; another one for other samples.
    """

    classes = ("sine", "square", "sawtooth")  # tells the model its `num_classes`

    def __init__(self, num_samples: int, *, length: int = 64, noise: float = 0.6, seed: int = 0) -> None:
        self._num_samples, self._length, self._noise, self._seed = num_samples, length, noise, seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        label = index % len(self.classes)
        frequency, phase = 1 + 3 * torch.rand(1, generator=random), torch.rand(1, generator=random)
        turns = frequency * torch.linspace(0, 1, self._length) + phase
        sine = torch.sin(2 * torch.pi * turns)
        wave = (sine, sine.sign(), 2 * (turns % 1) - 1)[label]
        return (wave + self._noise * torch.randn(self._length, generator=random))[None], label
