"""Token shards on disk: one stream of tokens per split, cut into files that are mapped, not loaded. Imports no torch.

    index.json              what is here, written last: a folder that has it is complete
    train_00000.bin         tokens, little-endian uint16 or uint32; every document is followed by `end_of_text`
    train_00000.starts.npy  int64 [documents]: where the documents of that shard start; no document crosses into another shard

Shapes: B windows, N documents. docs/decisions/0011-token-shards.md says why it is so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ddp_train.errors import ConfigError, DataError

FORMAT = "ddp_train tokens 1"
INDEX = "index.json"
_ENDS = 256  # tokens at either end, by which a stream is known again
DTYPES: Mapping[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class ShardEntry:
    """One file of tokens.

    Args:
        file: its name in the folder.
        tokens: with the `end_of_text` of every document.
        documents: at least 1.
        bytes: of the text behind it, as UTF-8; None: not known.
    """

    file: str
    tokens: int
    documents: int
    bytes: int | None = None

    @property
    def starts_file(self) -> str:
        return str(Path(self.file).with_suffix(".starts.npy"))


@dataclass(frozen=True)
class TokenIndex:
    """What index.json says."""

    dtype: str
    vocab_size: int
    tokenizer: str
    end_of_text: int
    splits: Mapping[str, tuple[ShardEntry, ...]]

    @classmethod
    def read(cls, root: Path) -> TokenIndex:
        path = root / INDEX
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"the format is {content['format']!r}")
            splits = {name: tuple(ShardEntry(**shard) for shard in shards) for name, shards in content["splits"].items()}
            index = cls(content["dtype"], content["vocab_size"], content["tokenizer"], content["end_of_text"], splits)
            shards = [shard for of_split in splits.values() for shard in of_split]
            fits_dtype = 0 <= index.end_of_text < index.vocab_size <= np.iinfo(DTYPES[index.dtype]).max + 1
            if not fits_dtype or not all(shard.tokens >= shard.documents >= 1 and Path(shard.file).name == shard.file for shard in shards):
                raise ValueError("tokens do not fit the vocabulary or the dtype, or a shard is empty")
        except OSError as error:
            happened = f"{path.absolute()} cannot be read: {error.strerror}"
            expected = "a folder that `ddp-train prepare tokens` has made (index.json comes last: without it the folder is not complete)"
            fix = f"ddp-train prepare tokens FILE... to={root}, or data.root=FOLDER"
            raise DataError(key="data.root", happened=happened, expected=expected, fix=fix) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"has unexpected content: {type(error).__name__}: {error}"
            raise damaged(path, what, f"what `ddp-train prepare tokens` wrote, {FORMAT!r}") from None
        return index

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text behind a token, `end_of_text` counted, over all splits; None: not known."""
        shards = [shard for shards in self.splits.values() for shard in shards]
        tokens = sum(shard.tokens for shard in shards)
        if not tokens:
            return None
        if self.tokenizer == "byte":
            return sum(shard.tokens - shard.documents for shard in shards) / tokens
        known = [shard.bytes for shard in shards if shard.bytes is not None]
        return sum(known) / tokens if len(known) == len(shards) else None


class TokenShards:
    """The tokens of one split as a single stream; windows may cross from a shard into the next.

    Files are mapped when they are first read, in each process again: pickling carries the path alone.

    Args:
        root: folder that `ddp-train prepare tokens` has made.
        split: a name in its index.

    Raises DataError: a file is missing, foreign or not as long as the index says.
    Raises ConfigError: there is no such split.
    """

    def __init__(self, root: str | Path, split: str = "train") -> None:
        self.root, self.split = Path(root).absolute(), split
        self.index = TokenIndex.read(self.root)
        if split not in self.index.splits:
            expected = f"one of {', '.join(self.index.splits)}"
            raise ConfigError(key="data.split", happened=f"{self.root} has no split {split!r}", expected=expected)
        self.shards = self.index.splits[split]
        self._dtype = DTYPES[self.index.dtype]
        for shard in self.shards:
            self._require_size(shard)
        self._borders = np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)
        self.num_tokens = int(self._borders[-1])
        self.map = cache(self._map)
        self._view: Tokens = np.empty((0, 0), self._dtype)  # all windows of the last length, of the only file

    @property
    def fingerprint(self) -> dict[str, Any]:
        """How many tokens and documents there are, and the first and the last ones; not how they were cut into shards."""
        count = min(_ENDS, self.num_tokens)
        ends = xxhash.xxh3_64_hexdigest(self.windows(np.asarray([0, self.num_tokens - count]), count).tobytes())
        return {"tokens": self.num_tokens, "documents": sum(shard.documents for shard in self.shards), "first_and_last_tokens": ends}

    def windows(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return the `length` tokens from each position of the stream in `starts` [B], shape [B, length]; all lie in the stream."""
        if len(self.shards) != 1:
            return self._join(starts, length)
        if self._view.shape[1] != length:
            self._view = sliding_window_view(self.map(0), length)
        windows: Tokens = self._view[starts]
        return windows

    def _map(self, number: int) -> Tokens:
        """Return all tokens of a shard, mapped and read-only."""
        path = self.root / self.shards[number].file
        try:
            tokens: Tokens = np.asarray(np.memmap(path, self._dtype, mode="r"))  # a plain view: the subclass makes every access slower
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}", "the shard that index.json names") from None
        if tokens[-1] != self.index.end_of_text:
            raise damaged(path, f"ends with the token {tokens[-1]}", f"{self.index.end_of_text}, which ends every document")
        return tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.split)

    def _join(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Return windows of several files: a slice for each window, and more where it goes on in the next files."""
        shards = self._borders.searchsorted(starts, side="right") - 1
        memories, parts = self._memories, []
        for shard, start in zip(shards.tolist(), (starts - self._borders[shards]).tolist(), strict=True):
            missing = length
            while missing:
                part = memories[shard][start : start + missing]
                parts.append(part)
                missing -= len(part)
                shard, start = shard + 1, 0
        return np.frombuffer(b"".join(parts), self._dtype).reshape(len(starts), length)

    @cached_property
    def _memories(self) -> list[memoryview]:
        """All files; a slice of a memoryview costs a third of an array's."""
        return [self.map(number).data for number in range(len(self.shards))]

    def _require_size(self, shard: ShardEntry) -> None:
        path, expected = self.root / shard.file, shard.tokens * self._dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}", "the shard that index.json names") from None
        if size != expected:
            what = "is truncated" if size < expected else "is too long"
            raise damaged(path, f"{what}: {size} bytes found", f"{expected} bytes, as index.json says ({shard.tokens} tokens)")


class TokenDocuments(TokenShards):
    """The documents of one split, in the order of the shards. Args: as for `TokenShards`."""

    def __init__(self, root: str | Path, split: str = "train") -> None:
        super().__init__(root, split)
        self._first_documents = np.cumsum([0, *(shard.documents for shard in self.shards)], dtype=np.int64)
        self._starts = cache(self._read_starts)

    def __len__(self) -> int:
        return int(self._first_documents[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document with its `end_of_text`, shape [N]."""
        parts = [np.zeros(0, np.int64)]
        for number, shard in enumerate(self.shards):
            starts = self._starts(number)
            parts.append(np.diff(starts, append=shard.tokens))
            if starts[0] != 0 or parts[-1].min() < 1:
                raise damaged(self.root / shard.starts_file, "does not rise from 0 to the shard's end", "the starts of its documents")
        return np.concatenate(parts)

    def read(self, index: int) -> Tokens:
        """Return the tokens of one document and its `end_of_text`: a read-only view of the mapped file."""
        number = int(self._first_documents.searchsorted(index, side="right")) - 1
        shard, starts = self.shards[number], self._starts(number)
        place = index - int(self._first_documents[number])
        stop = int(starts[place + 1]) if place + 1 < shard.documents else shard.tokens
        return self.map(number)[int(starts[place]) : stop]

    def _read_starts(self, number: int) -> NDArray[np.int64]:
        shard = self.shards[number]
        path, expected = self.root / shard.starts_file, f"int64 [{shard.documents}], as index.json says"
        try:
            starts = np.asarray(np.load(path, mmap_mode="r"))
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}", "the shard that index.json names") from None
        except (ValueError, EOFError) as error:
            raise damaged(path, f"is not an array: {error}", expected) from None
        if starts.dtype != np.int64 or starts.shape != (shard.documents,):
            raise damaged(path, f"has {starts.dtype} {list(starts.shape)}", expected)
        return starts


def damaged(path: Path, what: str, expected: str) -> DataError:
    fix = f"copy {path.name} again, or delete {path.parent} and prepare it again"
    return DataError(key="data.root", happened=f"{path} {what}", expected=expected, fix=fix)
