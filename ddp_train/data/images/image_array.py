"""Images held as uint8 or decoded from files, normalised a batch at a time, here or on the device: the base of all image data sets.

Random changes are pure functions of sample i and `keys[i]`, never of the rest of the batch, of ranks, workers or restarts.
Shapes: N samples in all, B samples in a batch, C channels, H height, W width.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.data.download import damaged
from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import Keys, random_bits
from ddp_train.interfaces import Batch, DataSource, Indices, Pixels

_CHUNK_FILES = 256  # decoded by one thread at a time
_MODES = {1: "L", 3: "RGB"}
_CROP_TOP, _CROP_LEFT, _FLIP = range(3)  # which independent draw of a key decides what


class ImageArray(DataSource):
    """Labelled images, normalised as (pixel / 255 - mean) / std, with optional random crops and flips in training.

    Args:
        images: uint8 [N, C, H, W].
        labels: 0 to `num_classes` - 1.
        mean, std: one value per channel, on the scale where white is 1; None is 0.5.
        crop_padding: pixels added to each side before a random crop to the old size; 0 is no crop.
        crop_fill: what these are: "black", or "reflect": the image itself, mirrored at its border.
        flip: mirror half of the images left to right.
    """

    gives_pairs = True
    argument_ranges: ClassVar = {"crop_padding": {"min": 0}, "image_size": {"min": 1}}  # the size: of those that read files

    def __init__(
        self,
        images: NDArray[np.uint8] | EncodedImages,
        labels: NDArray[np.integer[Any]],
        *,
        num_classes: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        crop_padding: int = 0,
        crop_fill: Literal["black", "reflect"] = "black",
        flip: bool = False,
    ) -> None:
        _, C, H, W = images.shape
        mean, std = ([0.5] * C if values is None else values for values in (mean, std))
        for name, values in {"mean": mean, "std": std}.items():
            if len(values) != C:
                raise ConfigError(key=f"data.{name}", happened=f"{len(values)} values", expected=f"one per channel: {C}")
        if min(std) <= 0:
            raise ConfigError(key="data.std", happened=f"{list(std)} is not positive", expected="standard deviations above 0")
        if crop_fill == "reflect" and crop_padding >= min(H, W):
            expected = f"less than the images' {min(H, W)} pixels, which are mirrored"
            raise ConfigError(key="data.crop_padding", happened=f"{crop_padding} is too much", expected=expected)
        # An array in memory as a tensor: loader workers get it through shared memory, once for all of them.
        self._images = torch.from_numpy(np.require(images, requirements="W")) if isinstance(images, np.ndarray) else images
        self._labels, self._image_shape = labels.astype(np.int64, copy=False), (C, H, W)
        self._device_labels: Tensor | None = None  # where the images live on a device
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
        labels = {"labels": self._labels[[0, -1]].tolist()}
        if not isinstance(self._images, Tensor):
            return labels
        return {**labels, "pixels": [xxhash.xxh3_64_hexdigest(image.numpy().tobytes()) for image in self._images[[0, -1]].cpu()]}

    @property
    def meaning(self) -> Mapping[str, Any]:
        return {**super().meaning, "mean": self._mean, "std": self._std}

    @property
    def augments(self) -> bool:
        return self._crop_padding > 0 or self._flip

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def to(self, device: torch.device) -> None:
        if not isinstance(self._images, Tensor):
            happened = "the images are read from files"
            raise ConfigError(key="loader.on_device", happened=happened, expected="images in memory", fix="data.in_memory=true")
        self._images, self._device_labels = self._images.to(device), torch.tensor(self._labels, device=device)
        self._scale_C11, self._black_C11 = self._scale_C11.to(device), self._black_C11.to(device)

    def give_pixels(self) -> None:
        """Let batches be bytes from now on, which are normalised on the device: to the same values, by the same two operations."""
        self._gives_pixels = True

    def batch(self, indices: Indices) -> Batch:
        """Return normalised images [B, C, H, W] float32 and labels [B] int64; or both as `Pixels`."""
        if isinstance(self._images, Tensor):
            chosen = _on(self._images.device, indices)
            images_BCHW = self._images.index_select(0, chosen)
        else:
            images_BCHW = torch.from_numpy(self._images[indices])
        if self._device_labels is not None:
            return self._normalised(images_BCHW), self._device_labels.index_select(0, chosen)
        labels_B = torch.from_numpy(self._labels[indices])
        if self._gives_pixels:
            scale, black = (tuple(values.flatten().tolist()) for values in (self._scale_C11, self._black_C11))
            return Pixels(images_BCHW, labels_B, scale, black)
        return self._normalised(images_BCHW), labels_B

    def augment(self, batch: Batch, keys: Keys, indices: Indices) -> Batch:
        if isinstance(batch, Pixels):  # not normalised, so black is 0
            return batch._replace(images=self._augmented(batch.images, keys, torch.zeros_like(self._black_C11)))
        images_BCHW, labels_B = batch
        return self._augmented(images_BCHW, keys, self._black_C11), labels_B

    def _augmented(self, images_BCHW: Tensor, keys: Keys, black_C11: Tensor) -> Tensor:
        if self._crop_padding:
            fill_C11 = {"black": black_C11, "reflect": None}[self._crop_fill]
            images_BCHW = random_crop(images_BCHW, keys, padding=self._crop_padding, fill_C11=fill_C11)
        return random_flip(images_BCHW, keys) if self._flip else images_BCHW

    def _normalised(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW.to(torch.float32).mul_(self._scale_C11).add_(self._black_C11)


def require_labels(path: Path, labels: NDArray[np.integer[Any]], *, num_images: int) -> None:
    """Refuse labels of a file that are not one for each image, from 0 to 9."""
    if len(labels) != num_images or not num_images:
        raise damaged(path, f"has {len(labels)} labels", f"one for each image ({num_images}), at least one")
    if labels.min() < 0 or labels.max() > 9:
        raise damaged(path, f"has labels from {labels.min()} to {labels.max()}", "0 to 9")


def random_crop(images_BCHW: Tensor, keys: Keys, *, padding: int, fill_C11: Tensor | None) -> Tensor:
    """Pad each side by `padding` pixels and cut a window of the old size at random, on the device that the images are on.

    `fill_C11`: what is added: one value per channel; None: the image itself, mirrored at its border.
    """
    B, C, H, W = images_BCHW.shape
    padded_BCHW = images_BCHW.new_empty(B, C, H + 2 * padding, W + 2 * padding)
    if fill_C11 is not None:
        padded_BCHW[:] = fill_C11
    padded_BCHW[:, :, padding:-padding, padding:-padding] = images_BCHW
    if fill_C11 is None:  # torch's own padding mirrors no bytes
        for dim, border in ((2, padded_BCHW[..., padding:-padding]), (3, padded_BCHW)):
            size = border.shape[dim]
            for to, source in ((0, padding + 1), (size - padding, size - 2 * padding - 1)):
                border.narrow(dim, to, padding).copy_(border.narrow(dim, source, padding).flip(dim))
    # A view of every possible window: no copy, so that the cut below is the only gather.
    windows = padded_BCHW.unfold(2, H, 1).unfold(3, W, 1)
    tops, lefts = (random_integers(keys, draw, below=2 * padding + 1) for draw in (_CROP_TOP, _CROP_LEFT))
    if images_BCHW.is_cpu:  # numpy copies whole rows: in half of the time, and less of large images
        return torch.from_numpy(np.ascontiguousarray(windows.numpy()[np.arange(B), :, tops, lefts]))
    device = images_BCHW.device
    return windows[torch.arange(B, device=device), :, _on(device, tops), _on(device, lefts)]


def random_flip(images_BCHW: Tensor, keys: Keys) -> Tensor:
    is_flipped_B = random_integers(keys, _FLIP, below=2) == 1
    if not images_BCHW.is_cpu:
        return torch.where(_on(images_BCHW.device, is_flipped_B)[:, None, None, None], images_BCHW.flip(3), images_BCHW)
    flipped_BCHW = images_BCHW.numpy().copy()
    flipped_BCHW[is_flipped_B] = images_BCHW.numpy()[is_flipped_B, :, :, ::-1]
    return torch.from_numpy(flipped_BCHW)


def random_integers(keys: Keys, draw: int, *, below: int) -> NDArray[np.int64]:
    """Return one integer in [0, below) for each key; `below` at most 2**32 (bias under below / 2**32)."""
    return (((random_bits(keys, draw) >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


def _on(device: torch.device, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


@dataclass(kw_only=True, eq=False)
class EncodedImages(ABC):
    """Image files that read like an array uint8 [N, C, H, W], decoded by Pillow at each access. Travels to loader workers.

    Raises DataError: Pillow is not installed.
    """

    image_size: int | None  # height and width: the shorter side is resized, and the middle cut out. None: of the first, as all have it
    channels: int  # 3 is RGB, 1 is grey

    def __post_init__(self) -> None:
        _import_pillow()  # now, not at the first batch

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def open(self, index: int) -> BinaryIO:
        """Open a file for reading."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a file for messages. Never fails."""

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        H, W = (self.image_size, self.image_size) if self.image_size else self._decode(0).shape[1:]
        return len(self), self.channels, H, W

    def __getitem__(self, indices: Indices, /) -> NDArray[np.uint8]:
        images_BCHW = np.empty((len(indices), *self.shape[1:]), np.uint8)
        for row in np.argsort(indices):  # neighbours lie side by side on the disk, in one shard
            index = int(indices[row])
            image = self._decode(index)
            if image.shape != self.shape[1:]:
                H, W = self.shape[2:]
                happened = f"image {index}, {self.name(index)}, is {image.shape[1]} x {image.shape[2]} pixels"
                expected = f"{H} x {W}, as the first image, {self.name(0)}"
                fix = f"data.image_size={min(H, W)}, which resizes all to one size"
                raise DataError(key="data.image_size", happened=happened, expected=expected, fix=fix)
            images_BCHW[row] = image
        return images_BCHW

    def decode_all(self) -> NDArray[np.uint8]:
        """Return all images. Threads help with large ones, which Pillow decodes outside the interpreter's lock."""
        images = np.empty(self.shape, np.uint8)
        chunks = np.array_split(np.arange(len(self)), -(-len(self) // _CHUNK_FILES))

        def decode(chunk: Indices) -> None:
            images[chunk[0] : chunk[-1] + 1] = self[chunk]

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            list(pool.map(decode, chunks))  # raises an error of a thread
        return images

    def _decode(self, index: int) -> NDArray[np.uint8]:
        try:
            with self.open(index) as file:
                return self._pixels(file)
        except DataError:  # the files say themselves what is wrong
            raise
        except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
            name = self.name(index)
            happened = f"image {index}, {name}, cannot be decoded: {type(error).__name__}: {error}"
            raise DataError(key="data.root", happened=happened, expected="a complete image", fix=f"replace or remove {name}") from error

    def _pixels(self, file: BinaryIO) -> NDArray[np.uint8]:
        """Return the pixels [C, H, W] of an open file."""
        pillow, size, mode = _import_pillow(), self.image_size, _MODES[self.channels]
        with pillow.open(file) as image:
            if size:
                image.draft(None, (size, size))  # lets a large JPEG be decoded at a fraction, never below the size
            pixels = image.convert(mode)
        if size and pixels.size != (size, size):
            scale = size / min(pixels.size)
            resized = pixels.resize([max(size, round(side * scale)) for side in pixels.size], pillow.Resampling.BILINEAR)
            left, top = (resized.width - size) // 2, (resized.height - size) // 2
            pixels = resized.crop((left, top, left + size, top + size))
        return np.asarray(pixels, np.uint8).reshape(pixels.height, pixels.width, -1).transpose(2, 0, 1)


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        fix = 'pip install "ddp-train[image]"'
        raise DataError(key="data", happened="reading image files needs Pillow, which is not installed", fix=fix) from error
    return Image
