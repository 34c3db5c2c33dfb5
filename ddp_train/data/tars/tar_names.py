"""Find the tar shards that a user means."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass

from ddp_train.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4")
_FIX = "data.root=FOLDER data.split=FOLDER_IN_IT, or a pattern: 'data.split=\"train-{00000..00012}.tar\"'"


@dataclass(frozen=True)
class ShardSet:
    """Tars below a folder, in order.

    Args:
        folder: absolute.
        pattern: what the tars' names have in common; the same tars have the same, however the user spelled it.
        names: the tars' paths, relative to `folder`.
    """

    folder: str
    pattern: str
    names: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.folder, name) for name in self.names]


def find_shards(root: str, split: str) -> ShardSet:
    """Return the tars of a split: root/split/*.tar or root/split-*.tar, whichever there is; root/*.tar for the split "".

    A split with one of `*?[{`, or that ends in .tar, is a pattern below root, with braces as WebDataset has them: {00000..00012}, {a,b}.
    Tars come in the order of their names, those of a pattern in the order in which its braces name them.

    Raises:
        DataError: no tars, both of the two, a shard of a pattern is missing, compressed tars.
    """
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise DataError(key="data.root", happened=f"{root} is no folder", expected="a folder with tar shards", fix=_FIX)
    if split.endswith((".tar", *_COMPRESSED)) or re.search(r"[*?\[{]", split):
        candidates = [(root, split)]
    elif split:
        candidates = [(os.path.join(root, split), "*.tar"), (root, f"{split}-*.tar")]
    else:
        candidates = [(root, "*.tar")]
    sets = [ShardSet(folder, pattern, _expand(folder, pattern)) for folder, pattern in candidates]
    found = [shards for shards in sets if shards.names]
    if not found:
        wanted = " or ".join(os.path.join(folder, pattern) for folder, pattern in candidates)
        beside = ", ".join(sorted(os.listdir(root))[:5]) or "nothing"
        raise DataError(key="data.split", happened=f"there is no {wanted}", expected=f"tar shards; {root} has {beside}", fix=_FIX)
    if len(found) > 1:
        happened = f"there are tars in {found[0].folder} and tars {found[1].pattern} beside it"
        fix = f"data.split='{split}/*.tar' or data.split='{split}-*.tar'"
        raise DataError(key="data.split", happened=happened, expected="one of the two", fix=fix)
    return found[0]


def _expand(folder: str, pattern: str) -> tuple[str, ...]:
    names: list[str] = []
    for part in _expand_braces(pattern):
        if not glob.has_magic(part):
            if not os.path.isfile(os.path.join(folder, part)):
                raise DataError(key="data.split", happened=f"{folder} has no shard {part}", expected=f"all of {pattern}")
            names.append(part)
        else:
            names += sorted(glob.glob(part, root_dir=folder))
            compressed = [name for end in _COMPRESSED for name in glob.glob(part.removesuffix(".tar") + end, root_dir=folder)]
            if compressed:
                raise refusal(os.path.join(folder, sorted(compressed)[0]))
    return tuple(names)


def _expand_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    numbers = _RANGE.fullmatch(match[1])
    if numbers:
        width = len(numbers[1])
        values = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    else:
        values = match[1].split(",")
    return [pattern[: match.start()] + value + rest for value in values for rest in _expand_braces(pattern[match.end() :])]


def refusal(path: str) -> DataError:
    return DataError(
        key="data.root",
        happened=f"{path} is compressed",
        expected="plain tars: in a compressed one no sample can be reached without reading all before it",
        fix="unpack it (gunzip, unzstd, ...); images are compressed already, so it hardly grows",
    )
