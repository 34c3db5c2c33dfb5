"""Write token shards: what `ddp_train/data/tokens/token_shards.py` reads. Imports no torch."""

from __future__ import annotations

import os
import re
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from ddp_train.data.tokens.token_shards import DTYPES, INDEX, ShardEntry, TokenIndex, Tokens
from ddp_train.system.files import write_atomic

_OURS = re.compile(r"(train|val)_\d{5}\.(bin|starts\.npy)(\.partial)?")
_PARTIAL = ".partial"  # in the name of a file that is not complete yet


class TokenWriter:
    """Writes a folder of token shards, as a stream: memory does not grow with the tokens, only with a shard's number of documents.

    Args:
        root: the folder; what an attempt that did not end has left in it is removed.
        splits: their names.
        shard_tokens: a shard ends with the document in which it gets this many.
    """

    def __init__(
        self, root: Path, *, vocab_size: int, tokenizer: str, end_of_text: int, splits: tuple[str, ...], shard_tokens: int
    ) -> None:
        _remove_ours(root)
        self._is_finished = False
        self._root, self._vocab_size, self._tokenizer, self._end_of_text = root, vocab_size, tokenizer, end_of_text
        self._dtype = "uint16" if vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"
        self._splits = {name: _SplitWriter(root, name, DTYPES[self._dtype], end_of_text, shard_tokens) for name in splits}

    def append(self, split: str, tokens: Tokens, *, num_bytes: int, ends_document: bool) -> None:
        """Append a part of a document to a split.

        Args:
            num_bytes: of the text behind the tokens.
            ends_document: it is the document's last part.
        """
        self._splits[split].append(tokens, num_bytes=num_bytes, ends_document=ends_document)

    def finish(self) -> TokenIndex:
        shards = {name: split.finish() for name, split in self._splits.items()}
        index = TokenIndex(self._dtype, self._vocab_size, self._tokenizer, self._end_of_text, shards)
        write_atomic(self._root / INDEX, index.to_json())
        self._is_finished = True
        return index

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for split in self._splits.values():
            split.close()
        if not self._is_finished:
            _remove_ours(self._root)


class _SplitWriter:
    def __init__(self, root: Path, name: str, dtype: np.dtype[np.unsignedinteger[Any]], end_of_text: int, shard_tokens: int) -> None:
        self._root, self._name, self._dtype, self._shard_tokens = root, name, dtype, shard_tokens
        self._end_of_text = np.asarray([end_of_text], dtype).tobytes()
        self._shards: list[ShardEntry] = []
        self._file: BinaryIO | None = None
        self._tokens = self._bytes = self._document_start = 0  # of the shard that is being written
        self._starts = array("q")  # a list would take four times the memory

    def append(self, tokens: Tokens, *, num_bytes: int, ends_document: bool) -> None:
        if self._file is None:
            self._file = open(self._path(_PARTIAL), "wb")  # noqa: SIM115
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._tokens += len(tokens)
        self._bytes += num_bytes
        if ends_document:
            self._file.write(self._end_of_text)
            self._starts.append(self._document_start)
            self._tokens += 1
            self._document_start = self._tokens
            if self._tokens >= self._shard_tokens:
                self._end_shard()

    def finish(self) -> tuple[ShardEntry, ...]:
        if self._file is not None:
            assert self._document_start == self._tokens, "the last document was not ended"
            self._end_shard()
        return tuple(self._shards)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_shard(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        shard = ShardEntry(self._path().name, self._tokens, len(self._starts), self._bytes)
        with open(self._root / (shard.starts_file + _PARTIAL), "wb") as file:
            np.save(file, np.asarray(self._starts, np.int64))
            file.flush()
            os.fsync(file.fileno())
        for name in (shard.file, shard.starts_file):
            (self._root / (name + _PARTIAL)).rename(self._root / name)
        self._shards.append(shard)
        self._tokens = self._bytes = self._document_start = 0
        self._starts = array("q")

    def _path(self, suffix: str = "") -> Path:
        return self._root / f"{self._name}_{len(self._shards):05d}.bin{suffix}"


def _remove_ours(root: Path) -> None:
    for path in root.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
