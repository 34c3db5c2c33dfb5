"""Image files that read like an array: what `image_folder` and `tar_shards` share.

Shapes: N samples in all, B samples in a batch, C channels, H height, W width.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import Indices

_CHUNK_FILES = 256  # decoded by one thread at a time
_MODES = {1: "L", 3: "RGB"}


class ImageFiles(Protocol):
    """Where the files are. Travels to loader workers."""

    def __len__(self) -> int: ...

    def open(self, index: int) -> BinaryIO:
        """Open a file for reading."""

    def name(self, index: int) -> str:
        """Return what a message calls the file. Never fails."""


class ImageDecoder:
    """Decodes whatever Pillow reads.

    Args:
        image_size: height and width in pixels: the shorter side is resized to it and the middle is cut out. None is the file's own size.
        channels: 3 is RGB, 1 is grey.

    Raises:
        ConfigError: another number of channels, no size.
        DataError: Pillow is not installed.
    """

    def __init__(self, *, image_size: int | None, channels: int) -> None:
        if channels not in _MODES:
            raise ConfigError(key="data.channels", happened=f"{channels} channels", expected="3 (RGB) or 1 (grey)")
        if image_size is not None and image_size < 1:
            raise ConfigError(key="data.image_size", happened=f"{image_size} is too small", expected="pixels, or null for the files' own")
        _import_pillow()  # now, not at the first batch
        self.image_size, self.channels = image_size, channels

    def __call__(self, file: BinaryIO) -> NDArray[np.uint8]:
        """Return the pixels [C, H, W] of an open file. Pillow raises nearly anything for a damaged one."""
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


class EncodedImages:
    """Files that read like an array uint8 [N, C, H, W], decoded at each access.

    Args:
        files: at least one.
        decoder: where it has no image size, all files must have the size of the first.
    """

    def __init__(self, files: ImageFiles, decoder: ImageDecoder) -> None:
        self._files, self._decoder = files, decoder
        size = decoder.image_size
        H, W = (size, size) if size else self._decode(0).shape[1:]
        self.shape = (len(files), decoder.channels, H, W)

    def __getitem__(self, indices: Indices, /) -> NDArray[np.uint8]:
        images_BCHW = np.empty((len(indices), *self.shape[1:]), np.uint8)
        for place in np.argsort(indices):  # neighbours lie side by side on the disk, in one shard
            index = int(indices[place])
            image = self._decode(index)
            if image.shape != self.shape[1:]:
                H, W = self.shape[2:]
                raise DataError(
                    key="data.image_size",
                    happened=f"image {index}, {self._files.name(index)}, is {image.shape[1]} x {image.shape[2]} pixels",
                    expected=f"{H} x {W}, as the first image, {self._files.name(0)}",
                    fix=f"data.image_size={min(H, W)}, which resizes all to one size",
                )
            images_BCHW[place] = image
        return images_BCHW

    def decode_all(self) -> NDArray[np.uint8]:
        """Return all images. Threads help with large ones, which Pillow decodes outside the interpreter's lock."""
        images = np.empty(self.shape, np.uint8)
        chunks = np.array_split(np.arange(len(self._files)), -(-len(self._files) // _CHUNK_FILES))

        def decode(chunk: Indices) -> None:
            images[chunk[0] : chunk[-1] + 1] = self[chunk]

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(decode, chunks):
                pass
        return images

    def _decode(self, index: int) -> NDArray[np.uint8]:
        try:
            with self._files.open(index) as file:
                return self._decoder(file)
        except DataError:  # the files say themselves what is wrong
            raise
        except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
            name = self._files.name(index)
            happened = f"image {index}, {name}, cannot be decoded: {type(error).__name__}: {error}"
            raise DataError(key="data.root", happened=happened, expected="a complete image", fix=f"replace or remove {name}") from error


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        fix = 'pip install "ddp-train[image]"'
        raise DataError(key="data", happened="reading image files needs Pillow, which is not installed", fix=fix) from error
    return Image
