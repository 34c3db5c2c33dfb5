"""Decode image files to arrays of one form. Shapes: C channels, H height, W width."""

from __future__ import annotations

from types import ModuleType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddp_train.errors import ConfigError, DataError

_MODES = {1: "L", 3: "RGB"}


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


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        fix = 'pip install "ddp-train[image]"'
        raise DataError(key="data", happened="reading image files needs Pillow, which is not installed", fix=fix) from error
    return Image
