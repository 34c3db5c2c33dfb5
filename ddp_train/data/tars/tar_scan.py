"""Find the tars that a user means, and read the headers of one: which samples it has, and where."""

import glob
import io
import os
import re
import tarfile
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddp_train.errors import DataError

SAMPLE = np.dtype([("shard", np.int64), ("header", np.int64), ("offset", np.int64), ("size", np.int64), ("label", np.int64)])
"""One sample: the number of its tar, where the image's header and its data begin, the image's size in bytes, and the label."""
# As WebDataset has them: the key ends at the first dot of the base name; names like __meta__ and what is in such folders hold no samples.
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_MAGICS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x04\x22\x4d\x18")  # gzip, zstd, bzip2, xz, lz4
_KEY = "each key (the path up to the first dot of the base name)"
_BLOCK_BYTES = 512
_LABEL_BYTES = 64  # more than any integer needs
_FIX = "data.root=FOLDER data.split=FOLDER_IN_IT, or a pattern: 'data.split=train-000*.tar'"


@dataclass(frozen=True)
class ShardSet:
    """Tars below a folder, in order.

    Args:
        folder: absolute.
        pattern: what the tars' names have in common, for messages.
        names: the tars' paths, relative to `folder`.
    """

    folder: str
    pattern: str
    names: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.folder, name) for name in self.names]


def find_shards(root: str, split: str) -> ShardSet:
    """Return the tars of a split by their names: root/split/*.tar or root/split-*.tar, whichever there is; root/*.tar for the split "".

    A split with one of `*?[`, or that ends in .tar, is a pattern below root. Raises DataError: no tars, or both of the two.
    """
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise DataError(key="data.root", happened=f"{root} is not a folder", expected="a folder with tar shards", fix=_FIX)
    if split.endswith(".tar") or glob.has_magic(split):
        candidates = [(root, split)]
    elif split:
        candidates = [(os.path.join(root, split), "*.tar"), (root, f"{split}-*.tar")]
    else:
        candidates = [(root, "*.tar")]
    sets = [ShardSet(folder, pattern, tuple(sorted(glob.glob(pattern, root_dir=folder)))) for folder, pattern in candidates]
    sets = [shards for shards in sets if shards.names]
    if not sets:
        wanted = " or ".join(os.path.join(folder, pattern) for folder, pattern in candidates)
        beside = ", ".join(sorted(os.listdir(root))[:5]) or "nothing"
        raise DataError(key="data.split", happened=f"there is no {wanted}", expected=f"tar shards; {root} has {beside}", fix=_FIX)
    if len(sets) > 1:
        happened = f"both the folder {sets[0].folder} and the pattern {sets[1].pattern} have tars"
        fix = f"data.split='{split}/*.tar' or data.split='{split}-*.tar'"
        raise DataError(key="data.split", happened=happened, expected="one of the two", fix=fix)
    return sets[0]


@dataclass(slots=True)
class _Sample:
    image: tuple[int, int, int] | None = None
    label: int | None = None
    extensions: list[str] = field(default_factory=list)


def scan(path: str, *, image_extensions: tuple[str, ...], label_extension: str) -> NDArray[np.void]:
    """Return the samples of a tar as SAMPLE [n], in the order of their first files; `shard` is 0. Reads headers and labels alone.

    Raises DataError: a damaged, truncated or compressed tar; a sample without an image or a label, or with two; a label that is no integer.
    """
    try:
        with open(path, "rb") as file:
            if file.read(8).startswith(_MAGICS):
                expected = "plain tars: in a compressed one no sample can be reached without reading all before it"
                fix = "unpack it (gunzip, unzstd, ...); images are compressed already, so this costs little space"
                raise DataError(key="data.root", happened=f"{path} is compressed", expected=expected, fix=fix)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                samples = _collect(tar, file, path, image_extensions, label_extension)
                # tarfile ends without a word at a damaged header: only a block of zeros is the end.
                if os.pread(file.fileno(), _BLOCK_BYTES, tar.offset) != bytes(_BLOCK_BYTES):
                    raise tarfile.ReadError(f"neither a header nor the archive's end at byte {tar.offset}")
    except (OSError, tarfile.TarError, ValueError) as error:
        happened = f"{path} cannot be read to its end: {error}"
        raise DataError(key="data.root", happened=happened, expected="a complete tar", fix="copy or make it again") from error
    rows = []
    for key, sample in samples.items():
        if sample.image is None or sample.label is None:
            lacking = image_extensions if sample.image is None else (label_extension,)
            happened = f"{path}: sample {key} has no .{' or .'.join(lacking)}, only .{', .'.join(sample.extensions)}"
            fix = "data.image_extensions=[...] or data.label_extension=..., if they have other names"
            raise DataError(key="data.root", happened=happened, expected=f"an image and a label for {_KEY}, in the same tar", fix=fix)
        rows.append((0, *sample.image, sample.label))
    return np.array(rows, SAMPLE)


def member_name(header: bytes) -> str:
    """Return the name in a member's header, which is several blocks long where the name is. tarfile.TarError: it is none."""
    with tarfile.open(fileobj=io.BytesIO(header), mode="r:") as tar:
        member = tar.next()
    if member is None:
        raise tarfile.ReadError("no header")
    return member.name


def _collect(
    tar: tarfile.TarFile, file: BinaryIO, path: str, image_extensions: tuple[str, ...], label_extension: str
) -> dict[str, _Sample]:
    samples: dict[str, _Sample] = {}
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep them all
        match = _NAME.fullmatch(member.name)
        if not member.isreg() or match is None or _META.match(member.name):
            continue
        extension = match[2].lower()
        sample = samples.setdefault(match[1], _Sample())
        sample.extensions.append(extension)
        if extension not in (*image_extensions, label_extension):
            continue
        what = "label" if extension == label_extension else "image"
        if getattr(sample, what) is not None:
            happened = f"{path}: {member.name} is the second {what} of its sample"
            fix = "data.image_extensions=[jpg] where a sample has several images on purpose; else another key"
            raise DataError(key="data.root", happened=happened, expected=f"one {what} for {_KEY}", fix=fix)
        if what == "label":
            sample.label = _label(file, member, path)
        else:
            sample.image = (member.offset, member.offset_data, member.size)
    return samples


def _label(file: BinaryIO, member: tarfile.TarInfo, path: str) -> int:
    size = min(member.size, _LABEL_BYTES)
    text = os.pread(file.fileno(), size, member.offset_data)
    if len(text) < size:
        raise tarfile.ReadError(f"it ends in {member.name}")
    label = int(text) if text.strip().isdigit() else -1
    if not 0 <= label < 2**63:
        happened = f"{path}: {member.name} holds {text.decode(errors='replace')!r}"
        raise DataError(key="data.label_extension", happened=happened, expected="the number of a class as text, at least 0")
    return label
