"""Images in folders named after their classes: root/train/cat/1.jpg."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.data.images.image_array import EncodedImages, ImageArray
from ddp_train.errors import DataError, join_few
from ddp_train.hashing import Keys, fingerprint_of, hash_of
from ddp_train.interfaces import Indices, Pixels

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ImageFolder(ImageArray):
    """The images of root/split/CLASS/*.{jpg,jpeg,png,bmp,webp}; classes are numbered in the order of their names.

    Args:
        root: folder of the splits.
        split: folder in it; "" where the class folders lie directly in root.
        image_size: height and width in pixels: the shorter side is resized to it and the middle is cut out.
            None is the size of the first image, which all must have.
        channels: 3 is RGB, 1 is grey.
        in_memory: decode everything once at the start and keep it as uint8, instead of decoding each image each time.
        mean, std, crop_padding, flip: as for `ImageArray`.
        labelled: False for root/split/*.jpg without class folders: a batch is images alone (`ddp-train predict`).
    """

    labels_argument = "labelled"  # false: batches have no labels

    def __init__(
        self,
        root: str,
        split: str = "train",
        *,
        image_size: int | None = None,
        channels: Literal[1, 3] = 3,
        in_memory: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        labelled: bool = True,
    ) -> None:
        _require_split(root, split)
        self._folder = os.path.join(root, split)
        self.classes, paths, labels = _list_images(self._folder, labelled)
        self._files, self._is_labelled = _Files(paths=paths, image_size=image_size, channels=channels), labelled
        pixels = self._files.decode_all() if in_memory else self._files
        super().__init__(pixels, labels, num_classes=len(self.classes), mean=mean, std=std, crop_padding=crop_padding, flip=flip)

    @property
    def facts(self) -> Mapping[str, Any]:
        if not self._is_labelled:
            return {"image_shape": super().facts["image_shape"]}
        return {**super().facts, "classes": self.classes}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The names of all files, and the first and the last one."""
        first, last = (fingerprint_of(self._files.open(place)) for place in (0, -1))
        return {"names": hash_of(path.removeprefix(self._folder) for path in self._files.paths), "first_file": first, "last_file": last}

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return super().labels if self._is_labelled else None

    def batch(self, indices: Indices) -> Any:
        """Return normalised images [B, C, H, W] float32 and, where there are classes, labels [B] int64."""
        batch = super().batch(indices)
        if self._is_labelled:
            return batch
        return batch._replace(labels=None) if isinstance(batch, Pixels) else batch[0]

    def augment(self, batch: Any, keys: Keys, indices: Indices) -> Any:
        if self._is_labelled or isinstance(batch, Pixels):
            return super().augment(batch, keys, indices)
        return super().augment((batch, torch.empty(0)), keys, indices)[0]

    def where(self, index: int) -> str:
        return self._files.name(index)


@dataclass(kw_only=True, eq=False)
class _Files(EncodedImages):
    paths: list[str]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> BinaryIO:
        return open(self.paths[index], "rb")

    def name(self, index: int) -> str:
        return self.paths[index]


def _require_split(root: str, split: str) -> None:
    if split and os.path.isdir(root) and not os.path.isdir(os.path.join(root, split)):
        happened = f"is {split!r}, and {os.path.abspath(root)} has no such folder"
        expected = join_few(_folders_in(root)) or "a folder with one folder of images per class"
        raise DataError(key="data.split", happened=happened, expected=expected, fix="data.split=FOLDER_IN_IT")


def _list_images(folder: str, labelled: bool) -> tuple[tuple[str, ...], list[str], NDArray[np.int64]]:
    """Return the classes, the files and the files' labels, sorted: folders list in another order on each machine."""
    if not labelled:
        paths = _images_in(folder)
        return (), paths, np.zeros(len(paths), np.int64)
    classes = tuple(_folders_in(folder))
    if not classes:
        entries = ", ".join(sorted(entry.name for entry in _scan(folder))[:5]) or "nothing"
        fix = "data.labelled=false, for `ddp-train predict`"
        raise DataError(key="data.root", happened=f"{folder} has no class folders", expected=f"one per class; found {entries}", fix=fix)
    by_class = [_images_in(os.path.join(folder, name)) for name in classes]
    return classes, list(chain.from_iterable(by_class)), np.repeat(np.arange(len(classes)), [len(paths) for paths in by_class])


def _images_in(folder: str) -> list[str]:
    paths = sorted(entry.path for entry in _scan(folder) if entry.name.lower().endswith(_SUFFIXES))
    if not paths:
        expected = f"files *{', *'.join(_SUFFIXES)}"
        raise DataError(key="data.root", happened=f"{folder} has no images", expected=expected, fix="add some, or remove it")
    return paths


def _folders_in(folder: str) -> list[str]:
    return sorted(entry.name for entry in _scan(folder) if entry.is_dir() and not entry.name.startswith("."))


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        happened = f"{os.path.abspath(folder)} cannot be read: {error.strerror}"
        expected = "a folder with one folder of images per class"
        raise DataError(key="data.root", happened=happened, expected=expected, fix="data.root=FOLDER data.split=FOLDER_IN_IT") from error
