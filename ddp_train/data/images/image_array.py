"""Images held as uint8, normalised a batch at a time, here or on the device: the base of MNIST, CIFAR-10 and image folders.

Random changes are pure functions: sample i of the result depends on sample i and `keys[i]`, never on the rest of the batch, so that the
number of ranks, workers or restarts changes nothing.
Shapes: N samples in all, B samples in a batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from ddp_train.data.images.encoded_images import EncodedImages
from ddp_train.errors import ConfigError
from ddp_train.hashing import Keys, random_bits
from ddp_train.interfaces import Batch, DataSource, Indices, Pixels


class ImageArray(DataSource):
    """Labelled images, normalised as (pixel / 255 - mean) / std, with optional random crops and flips in training.

    Args:
        images: uint8 [N, C, H, W].
        labels: 0 to `num_classes` - 1.
        mean, std: one value per channel, on the scale where white is 1.
        crop_padding: pixels added to each side before a random crop to the old size; 0 is no crop.
        crop_fill: what these are: "black", or "reflect": the image itself, mirrored at its border.
        flip: mirror half of the images left to right.
    """

    def __init__(
        self,
        images: NDArray[np.uint8] | EncodedImages,
        labels: NDArray[np.integer[Any]],
        *,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int = 0,
        crop_fill: Literal["black", "reflect"] = "black",
        flip: bool = False,
    ) -> None:
        _, C, H, W = images.shape
        for name, values in {"mean": mean, "std": std}.items():
            if len(values) != C:
                raise ConfigError(key=f"data.{name}", happened=f"{len(values)} values", expected=f"one per channel: {C}")
        if min(std) <= 0:
            raise ConfigError(key="data.std", happened=f"{list(std)} is not positive", expected="standard deviations above 0")
        if crop_padding < 0:
            raise ConfigError(key="data.crop_padding", happened=f"{crop_padding} is negative", expected="pixels, 0 for no crop")
        if crop_fill not in ("black", "reflect"):
            raise ConfigError(key="data.crop_fill", happened=f"is {crop_fill!r}", expected="black or reflect")
        if crop_fill == "reflect" and crop_padding >= min(H, W):
            expected = f"less than the images' {min(H, W)} pixels, which are mirrored"
            raise ConfigError(key="data.crop_padding", happened=f"{crop_padding} is too much", expected=expected)
        # An array in memory as a tensor: loader workers get it through shared memory, once for all of them.
        self._images = torch.from_numpy(np.require(images, requirements="W")) if isinstance(images, np.ndarray) else images
        self._labels, self._image_shape = labels.astype(np.int64, copy=False), (C, H, W)
        self._device_images: torch.Tensor | None = None
        self._num_classes, self._crop_padding, self._crop_fill, self._flip = num_classes, crop_padding, crop_fill, flip
        self._gives_pixels = False
        # (pixel / 255 - mean) / std as one multiplication and one addition
        self._mean, self._std = [float(value) for value in mean], [float(value) for value in std]
        means, stds = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        self._scale_C11 = torch.from_numpy((1 / (255 * stds)).astype(np.float32)).reshape(C, 1, 1)
        self._black_C11 = torch.from_numpy((-means / stds).astype(np.float32)).reshape(C, 1, 1)

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"image_shape": self._image_shape, "num_classes": self._num_classes}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The first and the last image and label, or their files."""
        ends = np.asarray([0, -1])
        found = {"labels": self._labels[ends].tolist()}
        if isinstance(self._images, torch.Tensor):
            return {**found, "pixels": [xxhash.xxh3_64_hexdigest(self._images[int(end)].numpy().tobytes()) for end in ends]}
        return found

    @property
    def meaning(self) -> Mapping[str, Any]:
        return {"mean": self._mean, "std": self._std}

    @property
    def augments(self) -> bool:
        return self._crop_padding > 0 or self._flip

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def to(self, device: torch.device) -> None:
        if not isinstance(self._images, torch.Tensor):
            raise ConfigError(
                key="loader.on_device", happened="the images are read from files", expected="images in memory", fix="data.in_memory=true"
            )
        self._device_images, self._device_labels = self._images.to(device), torch.tensor(self._labels, device=device)
        self._scale_C11, self._black_C11 = self._scale_C11.to(device), self._black_C11.to(device)

    def give_pixels(self) -> None:
        """Let batches be bytes from now on, which are normalised on the device: to the same values, by the same two operations."""
        self._gives_pixels = True

    def batch(self, indices: Indices) -> Batch:
        """Return normalised images [B, C, H, W] float32 and labels [B] int64; or both as `Pixels`."""
        if self._device_images is not None:
            chosen = torch.from_numpy(indices).to(self._device_images.device, non_blocking=True)
            return self._normalised(self._device_images.index_select(0, chosen)), self._device_labels.index_select(0, chosen)
        if isinstance(self._images, torch.Tensor):
            images_BCHW = self._images.index_select(0, torch.from_numpy(indices))
        else:
            images_BCHW = torch.from_numpy(self._images[indices])
        labels_B = torch.from_numpy(self._labels[indices])
        if self._gives_pixels:
            scale, black = (tuple(values.flatten().tolist()) for values in (self._scale_C11, self._black_C11))
            return Pixels(images_BCHW, labels_B, scale, black)
        return self._normalised(images_BCHW), labels_B

    def augment(self, batch: Batch, keys: Keys) -> Batch:
        if isinstance(batch, Pixels):  # not normalised, so black is 0
            return batch._replace(images=self._augmented(batch.images, keys, np.zeros(self._image_shape[0])))
        images_BCHW, labels_B = batch
        if self._device_images is not None:
            if self._crop_padding:
                black_C11 = self._black_C11 if self._crop_fill == "black" else None
                images_BCHW = random_crop_on_device(images_BCHW, keys, padding=self._crop_padding, fill_C11=black_C11)
            return (random_flip_on_device(images_BCHW, keys) if self._flip else images_BCHW), labels_B
        return self._augmented(images_BCHW, keys, self._black_C11.flatten().numpy()), labels_B

    def _augmented(self, images_BCHW: torch.Tensor, keys: Keys, black_C: ArrayLike) -> torch.Tensor:
        changed_BCHW = images_BCHW.numpy()
        if self._crop_padding:
            fill = black_C if self._crop_fill == "black" else None
            changed_BCHW = random_crop(changed_BCHW, keys, padding=self._crop_padding, fill=fill)
        if self._flip:
            changed_BCHW = random_flip(changed_BCHW, keys)
        return torch.from_numpy(changed_BCHW)

    def _normalised(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        return images_BCHW.to(torch.float32).mul_(self._scale_C11).add_(self._black_C11)


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
