"""A small model with one of each kind of parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """One of each: convolution, embedding, hidden matrix, norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 5)  # tied, so it is no hidden matrix, whatever it is called
        self.output.weight = self.embedding.weight

    def forward(self, tokens_B: Tensor) -> Tensor:
        shift = self.conv(torch.ones(1, 1, 3, 3)).sum()
        logits_BV: Tensor = self.output(self.norm(self.hidden(self.embedding(tokens_B)) + shift))
        return logits_BV


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {of[id(parameter)] for parameter in parameters}
