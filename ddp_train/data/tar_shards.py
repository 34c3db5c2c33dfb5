"""Images in tars as WebDataset has them, read in any order."""

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, BinaryIO, Literal

from ddp_train.data.images.image_array import EncodedImages, ImageArray
from ddp_train.data.tars.tar_index import TarIndex, open_index
from ddp_train.data.tars.tar_scan import find_shards, member_name
from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import fingerprint_of, hash_of

_MAX_OPEN = 64  # tars at a time in each process


class TarShards(ImageArray):
    """The images of WebDataset's tars; files with one key (000017.jpg, 000017.cls) are one sample. Samples keep the tars' order.

    The first use reads all headers and keeps where each sample lies in a file next to the tars; from then on a sample is one read.

    Args:
        root: folder of the tars, or of the folders that have them.
        split: which of them, see `find_shards`.
        image_extensions: files that are the sample's image; other files of a sample are passed over.
        label_extension: the file that holds the sample's class as a number, from 0.
        num_classes: None is the largest label + 1.

    The other arguments are those of `ImageFolder`.
    """

    def __init__(
        self,
        root: str,
        split: str = "train",
        *,
        image_extensions: Sequence[str] = ("jpg", "jpeg", "png", "bmp", "webp"),
        label_extension: str = "cls",
        num_classes: int | None = None,
        image_size: int | None = None,
        channels: Literal[1, 3] = 3,
        in_memory: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_padding: int = 0,
        flip: bool = False,
    ) -> None:
        if isinstance(image_extensions, str) or not image_extensions:
            happened = f"{image_extensions!r} is not a list of extensions"
            raise ConfigError(key="data.image_extensions", happened=happened, expected="a list, as [jpg,png]")
        extensions = [extension.lower().removeprefix(".") for extension in image_extensions]
        shards = find_shards(root, split)
        self._index = open_index(shards, image_extensions=extensions, label_extension=label_extension.lower().removeprefix("."))
        if not len(self._index.samples):
            raise DataError(key="data.root", happened=f"the tars {shards.pattern} in {shards.folder} are empty", expected="samples")
        self._members = _Members(index=self._index, image_size=image_size, channels=channels)
        pixels, labels = self._members.decode_all() if in_memory else self._members, self._index.samples["label"]
        num_classes = _num_classes(self._index, num_classes)
        super().__init__(pixels, labels, num_classes=num_classes, mean=mean, std=std, crop_padding=crop_padding, flip=flip)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The names and sizes of all tars, and the first and the last image."""
        tars = [f"{os.fsdecode(shard['name'])} {shard['size']}" for shard in self._index.shards]
        first, last = (fingerprint_of(self._members.open(index)) for index in (0, len(self._members) - 1))
        return {"tars": len(tars), "names_and_sizes": hash_of(tars), "first_image": first, "last_image": last}

    def where(self, index: int) -> str:
        return self._members.name(index)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_labels"}  # they are in the index, which is mapped

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._labels = self._index.samples["label"]


@dataclass(kw_only=True, eq=False)
class _Members(EncodedImages):
    """The image files in the tars. Each process opens the tars that it needs, and keeps the last ones open."""

    index: TarIndex

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shard = lru_cache(_MAX_OPEN)(partial(_ShardFile, self.index))

    def __len__(self) -> int:
        return len(self.index.samples)

    def open(self, index: int) -> BinaryIO:
        number, _, offset, size, _ = self.index.samples[index].item()
        content = os.pread(self._shard(number).fileno(), size, offset)
        if len(content) < size:
            raise EOFError(f"the tar ends {size - len(content)} bytes early")
        return io.BytesIO(content)

    def name(self, index: int) -> str:
        number, header, offset, _, _ = self.index.samples[index].item()
        path = self.index.shard_path(number)
        try:
            return f"{path}: {member_name(os.pread(self._shard(number).fileno(), offset - header, header))}"
        except (OSError, DataError, tarfile.TarError):  # it is no longer there
            return path

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(_Members, index=self.index, image_size=self.image_size, channels=self.channels), ()


class _ShardFile(io.FileIO):
    """An open tar, closed when nobody uses it any more: another thread may still read when the cache lets go of it."""

    def __init__(self, index: TarIndex, number: int) -> None:
        path, indexed = index.shard_path(number), index.shards[number]
        super().__init__(path)
        status = os.fstat(self.fileno())
        if (status.st_size, status.st_mtime_ns) != (indexed["size"], indexed["mtime_ns"]):
            happened = f"{path} has changed since it was indexed, when the run began"
            raise DataError(key="data.root", happened=happened, expected="tars that stay as they are", fix="start the run again")

    def __del__(self) -> None:
        self.close()  # Python would warn


def _num_classes(index: TarIndex, wanted: int | None) -> int:
    largest = int(index.shards["max_label"].max())
    if wanted is not None and wanted <= largest:
        expected = f"at least {largest + 1}: labels count from 0"
        raise ConfigError(key="data.num_classes", happened=f"{wanted} classes, but there is a label {largest}", expected=expected)
    return largest + 1 if wanted is None else wanted
