"""What every way trains: three models with the probe, and their data in two forms. Nothing of ours is in it, and it imports torch alone.

Shapes: B samples, C channels, T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from probe import Probed
from torch import Tensor, nn
from torch.utils.data import Dataset

STORED = 4096  # samples in memory; a longer data set goes through them again, so that its length costs nothing to make
LOG_EVERY_STEPS = 50


class Perceptron(Probed):
    """64-256-256-256-10: a step of about a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        self.note(self.head.bias)
        logits_BK: Tensor = self.head(self.layers(inputs_BD))
        return logits_BK


class NarrowResNet(Probed):
    """Three stages of two residual blocks, 16, 32 and 64 channels wide, with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*[ResidualBlock(before, after) for before, after in widths])
        self.head = nn.Linear(64, 10)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self.note(self.head.bias)
        logits_BK: Tensor = self.head(self.blocks(self.stem(images_BCHW)).mean(dim=(2, 3)))
        return logits_BK


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions; where the width grows the image shrinks."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.convolutions = nn.Sequential(
            *[nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)],
            *[nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)],
        )
        same = before == after
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        outputs_BCHW: Tensor = F.relu(self.convolutions(inputs_BCHW) + self.shortcut(inputs_BCHW))
        return outputs_BCHW


class SmallGPT(Probed):
    """nanoGPT's CPU setting: 4 layers, 4 heads, width 128, context 64, no bias, no dropout."""

    def __init__(self, vocabulary: int = 65, context: int = 64, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads=4) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("places", torch.arange(context), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.note(self.norm.weight)
        stream_BTD = self.tokens(tokens_BT) + self.positions(self.places)
        logits_BTV: Tensor = self.head(self.norm(self.blocks(stream_BTD)))
        return logits_BTV


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, stream_BTD: Tensor) -> Tensor:
        parts = self.attend(self.norm1(stream_BTD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_BTD = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True).transpose(1, 2).flatten(2)
        stream_BTD = stream_BTD + self.project(mixed_BTD)
        outputs_BTD: Tensor = stream_BTD + self.perceptron(self.norm2(stream_BTD))
        return outputs_BTD


class Batched:
    """Whole batches by their indices: the cheapest data there is, so that the loop shows."""

    def __init__(self, num_samples: int, inputs: Tensor, targets: Tensor) -> None:
        self.num_samples, self.inputs, self.targets = num_samples, inputs, targets

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices % STORED)
        return self.inputs[chosen], self.targets[chosen]


class Samples(Dataset[tuple[Tensor, Any]]):
    """Single samples, as most people write a data set."""

    def __init__(self, num_samples: int, inputs: Tensor, targets: Tensor) -> None:
        self.num_samples, self.inputs = num_samples, inputs
        self.targets = targets if targets.ndim > 1 else targets.tolist()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.inputs[index % STORED], self.targets[index % STORED]


def vectors() -> tuple[Tensor, Tensor]:
    """Return classified vectors of 64 numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(STORED, 64, generator=generator), torch.randint(10, (STORED,), generator=generator)


def images() -> tuple[Tensor, Tensor]:
    """Return classified images of 3 x 32 x 32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(STORED, 3, 32, 32, generator=generator), torch.randint(10, (STORED,), generator=generator)


def windows() -> tuple[Tensor, Tensor]:
    """Return windows of 64 tokens, and the tokens one place later."""
    tokens = torch.randint(65, (STORED, 65), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MAKERS = {"vectors": vectors, "images": images, "windows": windows}


def batched(kind: str, num_samples: int) -> Batched:
    """Return a data set that gives whole batches: what `data._target_` names in the tier `equal`."""
    return Batched(num_samples, *MAKERS[kind]())


def samples(kind: str, num_samples: int) -> Samples:
    """Return a data set that gives single samples: what `data._target_` names in the tier `user`."""
    return Samples(num_samples, *MAKERS[kind]())


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    data: str  # a name in MAKERS
    batch_size: int  # of one process
    objective: str  # what our conf/ calls the loss

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over samples or tokens, shape []."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


WORKLOADS = {
    "W1": Workload(Perceptron, "vectors", 64, "classification"),
    "W2s": Workload(NarrowResNet, "images", 16, "classification"),
    "W3": Workload(SmallGPT, "windows", 12, "language_modeling"),
}


@dataclass(frozen=True)
class Task:
    """What a script of a peer is asked to train: `SCRIPT WORKLOAD TIER STEPS PROCESSES`."""

    workload: Workload
    is_equal: bool  # batches from a batched source; else a DataLoader over single samples, and everybody's defaults
    steps: int
    processes: int

    @classmethod
    def of_command(cls) -> Task:
        name, tier, steps, processes = sys.argv[1:]
        return cls(WORKLOADS[name], tier == "equal", int(steps), int(processes))

    @property
    def num_samples(self) -> int:
        """Return the samples of all steps: one epoch."""
        return self.steps * self.processes * self.workload.batch_size

    def dataset(self) -> Samples:
        return samples(self.workload.data, self.num_samples)

    def batches(self, rank: int) -> Batches:
        return Batches(self, rank)


class Batches:
    """The batches of one rank in the tier `equal`: a permutation that is made once, and a gather for each batch."""

    def __init__(self, task: Task, rank: int) -> None:
        self.source = batched(task.workload.data, task.num_samples)
        order = np.random.default_rng(0).permutation(task.num_samples)
        self.order = order.reshape(task.steps, task.processes, -1)[:, rank]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.source.batch(indices) for indices in self.order)
