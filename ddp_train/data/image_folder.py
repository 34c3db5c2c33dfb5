"""Images in folders named after their classes: root/train/cat/1.jpg.

Shapes: N samples in all, B samples in a batch, C channels, H height, W width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.data.image_array import ImageArray
from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import Indices

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MODES = {1: "L", 3: "RGB"}
_CHUNK_FILES = 256  # decoded by one thread at a time


class ImageFolder(ImageArray):
    """The images of root/split/CLASS/*.{jpg,jpeg,png,bmp,webp}; classes are numbered in the order of their names.

    Args:
        root: folder of the splits.
        split: folder in it; "" where the class folders lie directly in root.
        image_size: height and width in pixels: the shorter side is resized to it and the middle is cut out.
            None is the size of the first image, which all must have.
        channels: 3 is RGB, 1 is grey.
        in_memory: decode everything once at the start and keep it as uint8, instead of decoding each image each time.
        mean, std: one value per channel, white is 1; None is 0.5.
        crop_padding: black pixels added to each side before a random crop; 0 is no crop.
        flip: mirror half of the images left to right.

    Raises:
        DataError: no images, images of different sizes without `image_size`, a damaged file (also from `batch`).
    """

    def __init__(
        self,
        root: str,
        split: str = "train",
        *,
        image_size: int | None = None,
        channels: int = 3,
        in_memory: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_padding: int = 0,
        flip: bool = False,
    ) -> None:
        if channels not in _MODES:
            raise ConfigError(key="data.channels", happened=f"{channels} channels", expected="3 (RGB) or 1 (grey)")
        if image_size is not None and image_size < 1:
            raise ConfigError(key="data.image_size", happened=f"{image_size} is too small", expected="pixels, or null for the files' own")
        self.classes, paths, labels = _list_images(os.path.join(root, split))
        files = _ImageFiles(paths, channels=channels, image_size=image_size)
        self._paths = paths
        super().__init__(
            files.decode_all() if in_memory else files,
            labels,
            num_classes=len(self.classes),
            mean=[0.5] * channels if mean is None else mean,
            std=[0.5] * channels if std is None else std,
            crop_padding=crop_padding,
            flip=flip,
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**super().facts, "classes": self.classes}

    def where(self, index: int) -> str:
        """Return the file of a sample."""
        return self._paths[index]


class _ImageFiles:
    """Files that read like an array uint8 [N, C, H, W], decoded at each access."""

    def __init__(self, paths: list[str], *, channels: int, image_size: int | None) -> None:
        _import_pillow()  # now, not at the first batch
        self._paths, self._mode, self._image_size = paths, _MODES[channels], image_size
        H, W = (image_size, image_size) if image_size else self._decode(0).shape[1:]
        self.shape = (len(paths), channels, H, W)

    def __getitem__(self, indices: Indices, /) -> NDArray[np.uint8]:
        images_BCHW = np.empty((len(indices), *self.shape[1:]), np.uint8)
        for place, index in enumerate(indices):
            image = self._decode(int(index))
            if image.shape != self.shape[1:]:
                raise self._odd_size(int(index), image.shape)
            images_BCHW[place] = image
        return images_BCHW

    def decode_all(self) -> NDArray[np.uint8]:
        """Return all images. Threads help with large ones, which Pillow decodes outside the interpreter's lock."""
        images = np.empty(self.shape, np.uint8)
        chunks = np.array_split(np.arange(len(self._paths)), -(-len(self._paths) // _CHUNK_FILES))

        def decode(chunk: Indices) -> None:
            images[chunk[0] : chunk[-1] + 1] = self[chunk]

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(decode, chunks):
                pass
        return images

    def _decode(self, index: int) -> NDArray[np.uint8]:
        pillow, path, size = _import_pillow(), self._paths[index], self._image_size
        try:
            with pillow.open(path) as image:
                if size:
                    image.draft(None, (size, size))  # lets a large JPEG be decoded at a fraction, never below the size
                pixels = image.convert(self._mode)
            if size and pixels.size != (size, size):
                scale = size / min(pixels.size)
                resized = pixels.resize([max(size, round(side * scale)) for side in pixels.size], pillow.Resampling.BILINEAR)
                left, top = (resized.width - size) // 2, (resized.height - size) // 2
                pixels = resized.crop((left, top, left + size, top + size))
            array = np.asarray(pixels, np.uint8).reshape(pixels.height, pixels.width, -1)
        except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
            happened = f"image {index}, {path}, cannot be decoded: {type(error).__name__}: {error}"
            raise DataError(key="data.root", happened=happened, expected="a complete image", fix=f"replace or remove {path}") from error
        return array.transpose(2, 0, 1)

    def _odd_size(self, index: int, shape: tuple[int, ...]) -> DataError:
        _, H, W = self.shape[1:]
        return DataError(
            key="data.image_size",
            happened=f"image {index}, {self._paths[index]}, is {shape[1]} x {shape[2]} pixels",
            expected=f"{H} x {W}, as the first image, {self._paths[0]}",
            fix=f"data.image_size={min(H, W)}, which resizes all to one size",
        )


def _list_images(folder: str) -> tuple[tuple[str, ...], list[str], NDArray[np.int64]]:
    """Return the classes, the files and the files' labels, sorted: folders list in another order on each machine."""
    classes = tuple(sorted(entry.name for entry in _scan(folder) if entry.is_dir() and not entry.name.startswith(".")))
    if not classes:
        found = ", ".join(sorted(entry.name for entry in _scan(folder))[:5]) or "nothing"
        raise DataError(key="data.root", happened=f"{folder} has no class folders", expected=f"one per class; found {found}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        in_class = sorted(entry.path for entry in _scan(os.path.join(folder, name)) if entry.name.lower().endswith(_SUFFIXES))
        if not in_class:
            happened = f"{os.path.join(folder, name)} has no images"
            raise DataError(key="data.root", happened=happened, expected=f"files *{', *'.join(_SUFFIXES)}", fix="add some, or remove it")
        paths += in_class
        labels += [label] * len(in_class)
    return classes, paths, np.asarray(labels, np.int64)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        happened = f"{os.path.abspath(folder)} cannot be read: {error.strerror}"
        expected = "a folder with one folder of images per class"
        raise DataError(key="data.root", happened=happened, expected=expected, fix="data.root=FOLDER data.split=FOLDER_IN_IT") from error


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        fix = 'pip install "ddp-train[image]"'
        raise DataError(key="data", happened="reading image files needs Pillow, which is not installed", fix=fix) from error
    return Image
