"""The small network that reaches 94 % on CIFAR-10 in some seconds on one GPU.

Shapes: B samples, C channels, H height, W width, K classes, P values in a patch (C x 2 x 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # height and width of the first layer's kernels


class Airbench(nn.Module):
    """Classify images: a first layer that whitens patches, and three groups of two convolutions.

    The first layer's kernels are found from training images before the first step (whitening.py) and stay; its bias is trained. All other
    convolutions begin as the identity as far as their channels go, and have no bias: batch norms have it, whose scales stay at 1.

    Batch normalisation takes its statistics from one micro-batch on one rank: the result depends on how the global batch is split.

    Args:
        image_shape: (C, H, W), from 9 x 9 pixels up.
        num_classes: K.
        width: channels of the first group; the next two have four times as many.
        norm_momentum: share of a micro-batch in batch norm's running averages.
        logit_scale: factor of the logits.

    Source: Jordan 2024, arXiv:2404.00498, sections 3.1 to 3.3.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        width: int = 64,
        norm_momentum: float = 0.4,
        logit_scale: float = 0.1111111111111111,
    ) -> None:
        super().__init__()
        channels = image_shape[0]
        self.logit_scale = logit_scale
        self.whitening = Whitening(channels)
        widths = [len(self.whitening.bias), width, 4 * width, 4 * width]
        self.groups = nn.Sequential(*(ConvGroup(*pair, norm_momentum=norm_momentum) for pair in pairwise(widths)))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits, shape [B, K]."""
        features_BCHW = self.groups(F.gelu(self.whitening(images_BCHW)))
        largest_BC = _max_pool(features_BCHW, *features_BCHW.shape[2:]).flatten(1)
        logits_BK: Tensor = self.head(largest_BC) * self.logit_scale
        return logits_BK


class Whitening(nn.Module):
    """Convolve with kernels that whitening.py finds, which are no parameters; the bias is trained."""

    weight: Tensor
    found_from: Tensor  # how many images; 0: not found yet. Saved and loaded with them, so that nobody finds them again

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, 2 * channels * PATCH**2, PATCH)
        self.register_buffer("weight", conv.weight.detach())
        self.register_buffer("found_from", torch.zeros((), dtype=torch.int64))
        self.bias = nn.Parameter(torch.zeros(conv.out_channels))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return features, shape [B, 2P, H - 1, W - 1]."""
        return F.conv2d(images_BCHW, self.weight, self.bias)


class ConvGroup(nn.Module):
    """Halve the image between two convolutions, each with batch norm and GELU.

    Args:
        norm_momentum: as for `Airbench`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm_momentum: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv3x3(in_channels, out_channels), _norm(out_channels, norm_momentum)
        self.conv2, self.norm2 = _conv3x3(out_channels, out_channels), _norm(out_channels, norm_momentum)

    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        """Return features, shape [B, out_channels, H // 2, W // 2]."""
        features_BCHW = F.gelu(self.norm1(_max_pool(self.conv1(inputs_BCHW), 2, 2)))
        return F.gelu(self.norm2(self.conv2(features_BCHW)))


def _conv3x3(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.detach()[:in_channels])  # the other filters, if any, keep torch's random weights
    return conv


def _max_pool(features_BCHW: Tensor, height: int, width: int) -> Tensor:
    """Return the largest value of each window. CUDA's own backward of it adds in any order, and raises where it must be deterministic."""
    if not torch.are_deterministic_algorithms_enabled():
        return F.max_pool2d(features_BCHW, (height, width))
    rows, columns = features_BCHW.shape[2] // height, features_BCHW.shape[3] // width
    whole_BCHW = features_BCHW[:, :, : rows * height, : columns * width]
    windows = whole_BCHW.unflatten(3, (columns, width)).unflatten(2, (rows, height)).transpose(3, 4)
    largest_BCHW: Tensor = windows.flatten(4).max(dim=4).values
    return largest_BCHW


def _norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=momentum)
    norm.weight.requires_grad_(False)
    return norm
