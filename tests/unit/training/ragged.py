"""A run whose samples count different numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_train.interfaces import Indices
from ddp_train.training.parts.components import Components
from tests.unit.parts import components


class Ragged:
    """Token sequences of which some targets do not count."""

    facts: Mapping[str, Any] = {"vocab_size": 11, "context_length": 6}

    def __init__(self, num_samples: int = 12) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(11, (num_samples, 6), generator=generator)
        self.targets = torch.randint(11, (num_samples, 6), generator=generator)
        for sample in range(num_samples):
            self.targets[sample, sample % 6 :] = -100  # sample 0 counts nothing, sample 5 counts five

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        return self.tokens[indices], self.targets[indices]


def ragged_components(*overrides: str) -> Components:
    small_gpt = ["model=gpt", "model.num_layers=1", "model.num_heads=2", "model.width=16", "objective=language_modeling"]
    return components(
        *[
            "data._target_=tests.unit.training.ragged.Ragged",
            "~data.split",
            "~data.image_size",
            "~data.channels",
            "~data.num_classes",
        ],
        *["~data.noise", "~data.seed", "~data.eval", "+data.num_samples=12", "objective.ignore_index=-100", *overrides],
        base=[*small_gpt, "~data.num_samples", "~metrics.tensorboard"],
    )
