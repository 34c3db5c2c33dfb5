"""Pictures as PNG files, for which no library is needed."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COLOUR_TYPES = {1: 0, 3: 2}  # channels -> grey, RGB
_FILTER_NONE = b"\0"  # before each row


def as_png(image: Tensor) -> bytes:
    """Return a picture [C, H, W] with C 1 or 3 as a PNG file; floats are clamped to [0, 1], and NaN is black.

    Source: W3C, Portable Network Graphics, third edition.
    """
    channels, height, width = image.shape
    pixels = b"".join(_FILTER_NONE + row_WC.tobytes() for row_WC in as_pixels(image))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def as_pixels(image: Tensor) -> NDArray[np.uint8]:
    """Return a picture [C, H, W] as bytes [H, W, C], which are its own; floats are clamped to [0, 1], and NaN is black."""
    if image.is_floating_point():
        image = image.float().nan_to_num(nan=0.0).clamp(0, 1).mul(255).round()
    return np.array(image.to(torch.uint8).permute(1, 2, 0).numpy(), order="C")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
