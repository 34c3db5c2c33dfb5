"""The table of a model's layers."""

from __future__ import annotations

from torch import nn

from ddp_train.training.build.layers import layer_table


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(1, 3).weight[:, 0].detach())
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2, bias=False)))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.body[0].requires_grad_(False)


def test_it_goes_as_deep_as_it_is_asked_to_with_shapes_counts_and_what_is_tied() -> None:
    assert layer_table(Tied(), depth=1) == [
        "layer      class       parameters  trained  shapes",
        "(itself)   Tied                56       36  scale [3]",
        "embedding  Embedding           20       20  weight [5, 4]",
        "body       Sequential          28        8",
        "head       Linear              25       25  weight = embedding.weight, bias [5]",
    ]
    assert layer_table(Tied(), depth=2)[4:7] == [
        "  0        Linear              20        0  weight [4, 4], bias [4]",
        "  1        ReLU",
        "  2        Sequential           8        8",
    ]
    assert len(layer_table(Tied(), depth=3)) == 9
