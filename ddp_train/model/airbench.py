"""The small network that reaches 94 % on CIFAR-10 in some seconds on one GPU.

Shapes: B samples, C channels, H height, W width, K classes, P values in a patch (C x 2 x 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import DataSource, finished

_PATCH = 2  # height and width
_CHUNK = 512  # samples that are read at a time
_EPSILON = 5e-4  # added to the variance along each direction


class Airbench(nn.Module):
    """Classify images: a first layer that whitens patches, and three groups of two convolutions.

    The first layer's kernels are found from training images before the first step (`start_from`) and stay; its bias is trained. All other
    convolutions begin as the identity as far as their channels go, and have no bias: batch norms have it, whose scales stay at 1.

    Batch normalisation takes its statistics from one micro-batch on one rank: the result depends on how the global batch is split.

    Args:
        image_shape: (C, H, W), from 9 x 9 pixels up.
        num_classes: K.
        width: channels of the first group; the next two have four times as many.
        norm_momentum: share of a micro-batch in batch norm's running averages.
        logit_scale: factor of the logits.
        whitening_samples: training images, the first ones, from which the first layer is found.

    Source: Jordan 2024, arXiv:2404.00498 (airbench94), sections 3.1 to 3.3; the whitening is Page's and tysam-code's, as cited there.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        *,
        width: int = 64,
        norm_momentum: float = 0.4,
        logit_scale: float = 0.1111111111111111,
        whitening_samples: int = 5000,
    ) -> None:
        super().__init__()
        channels = image_shape[0]
        self.logit_scale, self.whitening_samples = logit_scale, whitening_samples
        self.whitening = nn.Conv2d(channels, 2 * channels * _PATCH**2, kernel_size=_PATCH)
        self.whitening.weight.requires_grad_(False)
        assert self.whitening.bias is not None
        nn.init.zeros_(self.whitening.bias)
        widths = [self.whitening.out_channels, width, 4 * width, 4 * width]
        self.groups = nn.Sequential(*(ConvGroup(*pair, norm_momentum=norm_momentum) for pair in pairwise(widths)))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits, shape [B, K]."""
        features_BCHW = self.groups(F.gelu(self.whitening(images_BCHW)))
        largest_BC = _max_pool(features_BCHW, *features_BCHW.shape[2:]).flatten(1)
        logits_BK: Tensor = self.head(largest_BC) * self.logit_scale
        return logits_BK

    @torch.no_grad()
    def start_from(self, data: DataSource) -> None:
        """Let the first layer whiten: its outputs for patches of the data are uncorrelated and of variance 1, each with both signs."""
        covariance_PP = _patch_covariance(data, min(self.whitening_samples, len(data)))
        variances_P, directions_PP = torch.linalg.eigh(covariance_PP)  # ascending; directions are columns
        # The sign of a direction is the library's choice: the largest value becomes positive, so that all machines have the same.
        signs_P = directions_PP.gather(0, directions_PP.abs().argmax(dim=0, keepdim=True)).sign()
        kernels_PP = (directions_PP * signs_P / (variances_P + _EPSILON).sqrt()).T.flip(0)
        weight = self.whitening.weight
        weight.copy_(torch.cat([kernels_PP, -kernels_PP]).view(weight.shape))


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


def _patch_covariance(data: DataSource, num_samples: int) -> Tensor:
    """Return the mean of the products of all pairs of values in a patch, without taking off their means, float64 [P, P]."""
    total, count = torch.zeros(()), 0
    for images_BCHW in _images(data, num_samples):
        patches_BPN = F.unfold(images_BCHW, _PATCH)
        patches_NP = patches_BPN.transpose(1, 2).flatten(0, 1).double()
        total, count = total + patches_NP.T @ patches_NP, count + len(patches_NP)
    return total / count


def _images(data: DataSource, num_samples: int) -> Iterator[Tensor]:
    """Yield the first images, normalised and not augmented, a few at a time, on the CPU."""
    for start in range(0, num_samples, _CHUNK):
        images_BCHW, *_ = finished(data.batch(np.arange(start, min(start + _CHUNK, num_samples))))
        yield images_BCHW.float().cpu()
