"""Turn text into tokens, and write them as the shards that token_shards.py reads. Imports no torch."""

from __future__ import annotations

import os
import re
from array import array
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np

from ddp_train.data.tokens.token_shards import DTYPES, INDEX, ShardEntry, TokenIndex, Tokens
from ddp_train.errors import ConfigError
from ddp_train.system.files import write_atomic

_CUT = re.compile(r"(?<=\S\n)(?=[^\W\d_])|(?= [^\W\d_])")
_OURS = re.compile(r"(train|val)_\d{5}\.(bin|starts\.npy)")
_SEARCH_BYTES = 1 << 16
_CHARACTER_BYTES = 4  # the longest in UTF-8


class Tokenizer(Protocol):
    """What makes tokens of text; used by several threads at a time."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text in UTF-8. UnicodeDecodeError: it is not UTF-8, which this tokenizer needs."""

    def cut(self, text: bytes) -> int:
        """Return the last place where `text` can be cut so that its parts have the tokens of the whole; 0: there is none."""


class ByteTokenizer:
    """Every byte is a token, whatever the text is; 256 ends a text."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8)

    def cut(self, text: bytes) -> int:
        return len(text)


class TiktokenTokenizer:
    """An encoding of tiktoken, by its name: gpt2, cl100k_base, o200k_base, ... Words like <|endoftext|> in a text are text."""

    def __init__(self, name: str) -> None:
        self.name = f"tiktoken:{name}"
        self._encoding = _encoding(name)
        self.vocab_size = self._encoding.n_vocab
        self.end_of_text = self._encoding.eot_token

    def encode(self, text: bytes) -> Tokens:
        tokens: Tokens = self._encoding.encode_to_numpy(text.decode("utf-8"), disallowed_special=())
        return tokens

    def cut(self, text: bytes) -> int:
        """Cut before a space with a word after it, or after the end of a line, where every encoding of tiktoken cuts too.

        Not after an empty line: GPT-2 has its end and the one before as one token, unless a letter follows.
        """
        for stop in range(len(text), 0, -_SEARCH_BYTES):
            start = max(stop - _SEARCH_BYTES, 0)
            piece = text[start:stop].decode("utf-8", errors="surrogateescape")  # it may begin and end inside a character
            places = [match.start() for match in _CUT.finditer(piece, _CHARACTER_BYTES if start else 0)]
            if places:
                return start + len(piece[: places[-1]].encode("utf-8", errors="surrogateescape"))
        return 0


def make_tokenizer(text: str) -> Tokenizer:
    kind, _, name = text.partition(":")
    if text == "byte":
        return ByteTokenizer()
    if kind == "tiktoken" and name:
        return TiktokenTokenizer(name)
    happened = f"there is no tokenizer {text!r}"
    raise ConfigError(key="tokenizer", happened=happened, expected="byte or tiktoken:NAME", fix="tokenizer=tiktoken:gpt2")


def _encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError:
        happened, fix = f"tiktoken:{name} needs the package tiktoken", 'pip install "ddp-train[text]", or tokenizer=byte'
        raise ConfigError(key="tokenizer", happened=happened, expected="tiktoken installed", fix=fix) from None
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # it fetches the vocabulary when it is first used
        happened = f"tiktoken cannot fetch the vocabulary of {name}: {type(error).__name__}: {error}"
        expected = "a network, or the vocabulary in the folder TIKTOKEN_CACHE_DIR"
        fix = "set TIKTOKEN_CACHE_DIR=FOLDER where there is a network too, and copy FOLDER here; or tokenizer=byte"
        raise ConfigError(key="tokenizer", happened=happened, expected=expected, fix=fix) from None
    except ValueError as error:
        happened, expected = f"tiktoken has no encoding {name!r}: {error}", f"one of {', '.join(tiktoken.list_encoding_names())}"
        raise ConfigError(key="tokenizer", happened=happened, expected=expected, fix="tokenizer=tiktoken:gpt2") from error


class TokenWriter:
    """Writes a folder of token shards, as a stream: memory does not grow with the tokens, only with a shard's number of documents.

    The index comes last: files without it are those of an attempt that did not end.

    Args:
        root: the folder; what an attempt that did not end has left in it is removed.
        shard_tokens: a shard ends with the document in which it gets this many.
    """

    def __init__(self, root: Path, tokenizer: Tokenizer, *, shard_tokens: int) -> None:
        _remove_ours(root)
        end_of_text, dtype = tokenizer.end_of_text, "uint16" if tokenizer.vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"
        self._root, self._index = root, TokenIndex(dtype, tokenizer.vocab_size, tokenizer.name, end_of_text, {})
        self.splits = {name: SplitWriter(root, name, DTYPES[dtype], end_of_text, shard_tokens) for name in ("train", "val")}

    def finish(self) -> TokenIndex:
        index = replace(self._index, splits={name: split.finish() for name, split in self.splits.items()})
        write_atomic(self._root / INDEX, index.to_json())
        return index

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for split in self.splits.values():
            split.close()
        if kind is not None:
            _remove_ours(self._root)


class SplitWriter:
    """Writes the token shards of one split."""

    def __init__(self, root: Path, name: str, dtype: np.dtype[np.unsignedinteger[Any]], end_of_text: int, shard_tokens: int) -> None:
        self._root, self._name, self._dtype, self._shard_tokens = root, name, dtype, shard_tokens
        self._end_of_text = np.asarray([end_of_text], dtype).tobytes()
        self._shards: list[ShardEntry] = []
        self._file: BinaryIO | None = None
        self._tokens = self._bytes = self._document_start = 0  # of the shard that is being written
        self._starts = array("q")  # a list would take four times the memory

    def append(self, tokens: Tokens, *, num_bytes: int, ends_document: bool) -> None:
        """Append a part of a document: `num_bytes` is the size of its text, `ends_document` is true for the last part."""
        if self._file is None:
            self._file = open(self._path(), "wb")  # noqa: SIM115
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
        shard = ShardEntry(self._path().name, self._tokens, len(self._starts), self._bytes)
        with open(self._root / shard.starts_file, "wb") as starts:
            np.save(starts, np.asarray(self._starts, np.int64))
            for file in (starts, self._file):
                file.flush()
                os.fsync(file.fileno())
        self.close()
        self._shards.append(shard)
        self._tokens = self._bytes = self._document_start = 0
        self._starts = array("q")

    def _path(self) -> Path:
        return self._root / f"{self._name}_{len(self._shards):05d}.bin"


def _remove_ours(root: Path) -> None:
    for path in root.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
