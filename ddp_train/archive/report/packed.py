"""Many numbers as text within a page: float32, their bytes sorted by place, so that they compress well, then deflate and base64."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Place = tuple[int, int]
"""Where numbers lie among all of a page: offset and length."""


class Numbers:
    """Collects the numbers of a page. The page reads them as one Float32Array: seven digits, NaN stays NaN."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.float32]] = []
        self._length = 0

    def add(self, values: ArrayLike) -> Place:
        """Take numbers in; return where the page finds them."""
        array = np.asarray(values, dtype=np.float32).ravel()
        self._arrays.append(array)
        self._length += len(array)
        return self._length - len(array), len(array)

    def text(self) -> str:
        """Return all numbers: the first bytes of all of them, then the second ones, and so on."""
        joined = np.concatenate([*self._arrays, np.empty(0, np.float32)]).astype("<f4")
        return packed(joined.view(np.uint8).reshape(-1, 4).T.tobytes())


def packed(content: bytes) -> str:
    """Compress bytes into text that HTML holds as it is; a browser's DecompressionStream reads it."""
    return base64.b64encode(zlib.compress(content, 9)).decode()
