"""The first layer's kernels, found from training images before the first step.

Shapes: B samples, C channels, H height, W width, P values in a patch (C x 2 x 2), N patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from airbench94.model import PATCH
from ddp_train.interfaces import DataSource, Run
from ddp_train.interfaces.batch import normalise_and_mix

_CHUNK = 512  # samples that are read at a time
_EPSILON = 5e-4  # added to the variance along each direction


class Whiten:
    """Lets the first layer of an `Airbench` whiten, once: weights that a run goes on with, or begins with, know that they do.

    Args:
        num_images: of the training data, the first ones, as they are.

    Source: the whitening is Page's and tysam-code's, as cited by Jordan 2024, arXiv:2404.00498, section 3.2.
    """

    def __init__(self, num_images: int = 5000) -> None:
        if num_images < 1:
            raise ValueError(f"num_images is {num_images}, and at least 1 is needed")
        self._num_images = num_images

    @torch.no_grad()
    def on_start(self, run: Run) -> None:
        """Find the kernels where the weights have none. Collective."""
        weight, found_from = (run.model.get_buffer(f"whitening.{name}") for name in ("weight", "found_from"))
        if found_from.item():
            return
        if not isinstance(run.data, DataSource):
            raise ValueError("the first layer is found from the first samples of the training data, and a stream has no positions")
        num_images = min(self._num_images, len(run.data))
        kernels = whitening_kernels(_images(run.data, num_images)).view(weight.shape).to(run.device, weight.dtype)
        if run.world_size > 1:  # another machine's algebra may round in another way
            torch.distributed.broadcast(kernels, src=0)
        weight.copy_(kernels)
        found_from.fill_(num_images)


def whitening_kernels(images: Iterable[Tensor]) -> Tensor:
    """Return kernels, float64 [2P, P], whose outputs for patches of the images are uncorrelated and of variance 1, each with both signs."""
    variances_P, directions_PP = torch.linalg.eigh(_patch_covariance(images))  # ascending; directions are columns
    # The sign of a direction is the library's choice: the largest value becomes positive, so that all machines have the same.
    signs_P = directions_PP.gather(0, directions_PP.abs().argmax(dim=0, keepdim=True)).sign()
    kernels_PP = (directions_PP * signs_P / (variances_P + _EPSILON).sqrt()).T.flip(0)
    return torch.cat([kernels_PP, -kernels_PP])


def _patch_covariance(images: Iterable[Tensor]) -> Tensor:
    """Return the mean of the products of all pairs of values in a patch, without taking off their means, float64 [P, P]."""
    total, count = torch.zeros(()), 0
    for images_BCHW in images:
        patches_NP = F.unfold(images_BCHW, PATCH).transpose(1, 2).flatten(0, 1).double()
        total, count = total + patches_NP.T @ patches_NP, count + len(patches_NP)
    return total / count


def _images(data: DataSource, num_images: int) -> Iterator[Tensor]:
    """Yield the first images, normalised and not augmented, a few at a time, on the CPU."""
    for start in range(0, num_images, _CHUNK):
        images_BCHW, *_ = normalise_and_mix(data.batch(np.arange(start, min(start + _CHUNK, num_images))))
        yield images_BCHW.float().cpu()
