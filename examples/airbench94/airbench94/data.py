"""CIFAR-10 whose images show one side in one epoch and the other in the next: a data set of both, and the order that takes turns.

Shapes: N images, n positions, B samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.data.cifar10 import CIFAR10
from ddp_train.interfaces import Batch, Indices, Pixels


class TwoSidedCIFAR10(CIFAR10):
    """Sample i is image i as it is, sample N + i is image i mirrored left to right.

    Args:
        root, split, crop_padding, crop_fill: as for `CIFAR10`.
        both_sides: false: the N images as they are, for evaluation.
    """

    def __init__(
        self,
        root: str,
        split: Literal["train", "test"] = "train",
        *,
        crop_padding: int = 0,
        crop_fill: Literal["black", "reflect"] = "black",
        both_sides: bool = True,
    ) -> None:
        super().__init__(root, split, crop_padding=crop_padding, crop_fill=crop_fill)
        self.num_images, self._sides = super().__len__(), 1 + both_sides

    def __len__(self) -> int:
        return self._sides * self.num_images

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.tile(super().labels, self._sides)

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`: images [B, C, H, W] and labels [B], or both as `Pixels`."""
        found: Any = super().batch(indices % self.num_images)
        images_BCHW = found[0]
        is_mirrored_B = torch.from_numpy(indices >= self.num_images).to(images_BCHW.device, non_blocking=True)
        images_BCHW = torch.where(is_mirrored_B[:, None, None, None], images_BCHW.flip(3), images_BCHW)
        return found._replace(images=images_BCHW) if isinstance(found, Pixels) else (images_BCHW, found[1])


class AlternatingSides:
    """The order of `TwoSidedCIFAR10`: each image once in an epoch, on the side that it did not show in the epoch before.

    Two epochs after each other have both sides of every image, where flips at random give half of the images the same side twice.
    A `ddp_train.interfaces.Sampler`: a function of seed, epoch and position, so that ranks, workers and restarts change nothing.

    Args:
        dataset: the training split.
        seed: of the run.

    Source: Jordan 2024, arXiv:2404.00498, section 3.6.
    """

    repeats, window = False, 1

    def __init__(self, dataset: TwoSidedCIFAR10, seed: int) -> None:
        if len(dataset) != 2 * dataset.num_images:
            raise ValueError("the order takes turns between two sides: data.both_sides=true")
        self.length, self.seed = dataset.num_images, seed
        self._first_sides_N = np.random.default_rng([seed, 1]).integers(0, 2, self.length)
        self._order: tuple[int, Indices] | None = None  # of the epoch that was asked for last

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at `positions` of an epoch, shape [n] -> [n]."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, 0, epoch]).permutation(self.length)
        images_n = self._order[1][positions]
        samples_n: Indices = images_n + self.length * ((self._first_sides_N[images_n] + epoch) % 2)
        return samples_n
