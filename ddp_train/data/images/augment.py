"""Random changes of a batch of images, each decided by its sample's key alone.

Pure functions over numpy arrays: sample i of the result depends on sample i and `keys[i]`, never on the rest of the batch, so
that the number of ranks, workers or restarts changes nothing.
Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from ddp_train.hashing import Keys, random_bits

_CROP_TOP, _CROP_LEFT, _FLIP = range(3)  # which independent draw of a key decides what


def random_crop(images_BCHW: NDArray[Any], keys: Keys, *, padding: int, fill: ArrayLike | None) -> NDArray[Any]:
    """Pad each side by `padding` pixels and cut a window of the old size at random.

    Args:
        fill: what is added: one value per channel; None: the image itself, mirrored at its border.
    """
    B, C, H, W = images_BCHW.shape
    if fill is None:
        padded_BCHW = np.pad(images_BCHW, ((0, 0), (0, 0), (padding, padding), (padding, padding)), mode="reflect")
    else:
        padded_BCHW = np.empty((B, C, H + 2 * padding, W + 2 * padding), images_BCHW.dtype)
        padded_BCHW[:] = np.asarray(fill, images_BCHW.dtype)[:, None, None]
        padded_BCHW[:, :, padding:-padding, padding:-padding] = images_BCHW
    # A view of every possible window: no copy, so that the cut below is the only gather.
    windows = sliding_window_view(padded_BCHW, (H, W), axis=(2, 3))
    tops = random_integers(keys, _CROP_TOP, below=2 * padding + 1)
    lefts = random_integers(keys, _CROP_LEFT, below=2 * padding + 1)
    return np.ascontiguousarray(windows[np.arange(B), :, tops, lefts])


def random_flip(images_BCHW: NDArray[Any], keys: Keys) -> NDArray[Any]:
    """Mirror each image left to right with probability one half."""
    is_flipped_B = random_integers(keys, _FLIP, below=2) == 1
    flipped_BCHW = images_BCHW.copy()
    flipped_BCHW[is_flipped_B] = images_BCHW[is_flipped_B, :, :, ::-1]
    return flipped_BCHW


def random_crop_on_device(images_BCHW: Tensor, keys: Keys, *, padding: int, fill_C11: Tensor | None) -> Tensor:
    """Do what `random_crop` does, to the pixel, on the device that the images are on."""
    B, C, H, W = images_BCHW.shape
    if fill_C11 is None:
        padded_BCHW = pad(images_BCHW, (padding,) * 4, mode="reflect")
    else:
        padded_BCHW = fill_C11.expand(B, C, H + 2 * padding, W + 2 * padding).clone()
        padded_BCHW[:, :, padding:-padding, padding:-padding] = images_BCHW
    windows = padded_BCHW.unfold(2, H, 1).unfold(3, W, 1)
    corners = (random_integers(keys, draw, below=2 * padding + 1) for draw in (_CROP_TOP, _CROP_LEFT))
    tops, lefts = (torch.from_numpy(corner).to(images_BCHW.device, non_blocking=True) for corner in corners)
    return windows[torch.arange(B, device=images_BCHW.device), :, tops, lefts]


def random_flip_on_device(images_BCHW: Tensor, keys: Keys) -> Tensor:
    """Do what `random_flip` does, to the pixel, on the device that the images are on."""
    is_flipped_B = torch.from_numpy(random_integers(keys, _FLIP, below=2) == 1).to(images_BCHW.device, non_blocking=True)
    return torch.where(is_flipped_B[:, None, None, None], images_BCHW.flip(3), images_BCHW)


def random_integers(keys: Keys, draw: int, *, below: int) -> NDArray[np.int64]:
    """Return one integer in [0, below) for each key; `below` at most 2**32 (bias under below / 2**32)."""
    return (((random_bits(keys, draw) >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)).astype(np.int64)
