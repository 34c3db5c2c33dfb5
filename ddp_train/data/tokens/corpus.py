"""Texts as documents, each for a split, and encoded in threads, in memory that does not grow with the text. Imports no torch."""

from __future__ import annotations

import gzip
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ddp_train.data.tokens.token_shards import Tokens
from ddp_train.data.tokens.token_writer import Tokenizer
from ddp_train.errors import ConfigError, DataError, plural

_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
_NO_TEXT = (".json", ".parquet", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz")
_BLOCK_BYTES = 1 << 20  # of text that is encoded at a time
_MAX_UNCUT_BYTES = 1 << 26  # without a place to cut


def text_files(path: Path) -> list[Path]:
    """Return a file, or the files of text below a folder in the order of their names. DataError: there is none, or it is no text."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES) and file.is_file())
        if not files:
            raise DataError(happened=f"the folder {path} has no text", expected=f"files *{', *'.join(_SUFFIXES)}")
        return files
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix in _NO_TEXT:
        raise DataError(happened=f"{path} is a {suffix} file", expected="text, or .jsonl with one document a line; unpacked, or as .gz")
    return [path]


@dataclass(frozen=True)
class Passage:
    """A document, or a part of a long one."""

    split: str
    text: bytes
    ends_document: bool
    where: str  # for errors


class Corpus:
    """The documents of some files, in order; empty ones are left out and counted.

    `val_fraction`: share of the documents for the split val, evenly spread; of a single text file its end. 0: none.

    Raises ConfigError: that is less than one document, where it is known before they are read.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer, *, val_fraction: float) -> None:
        self._files, self._val_fraction, self._tokenizer = files, val_fraction, tokenizer
        self.documents = self.empty = 0
        if len(files) > 1 and not any(map(_is_jsonl, files)):
            self._require_val(len(files))

    def encoded(self) -> Iterator[tuple[Passage, Tokens]]:
        """Yield all documents and their tokens. Threads encode them; tiktoken does it outside the interpreter's lock.

        Raises ConfigError: val_fraction is less than one of the documents.
        """
        threads = len(os.sched_getaffinity(0))
        waiting: deque[Future[list[tuple[Passage, Tokens]]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for group in self._groups():
                waiting.append(pool.submit(lambda group: [(passage, self._encode(passage)) for passage in group], group))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        if self.documents:
            self._require_val(self.documents)

    def _groups(self) -> Iterator[list[Passage]]:
        """Group short documents: a thread for each would cost more than to encode it."""
        group, num_bytes = list[Passage](), 0
        for passage in self._passages():
            group.append(passage)
            num_bytes += len(passage.text)
            if num_bytes >= _BLOCK_BYTES:
                yield group
                group, num_bytes = [], 0
        yield group

    def _passages(self) -> Iterator[Passage]:
        if len(self._files) == 1 and not _is_jsonl(self._files[0]) and self._val_fraction > 0:
            middle = _middle(self._files[0], self._val_fraction)
            yield from self._text(self._files[0], "train", 0, middle)
            yield from self._text(self._files[0], "val", middle, None)
            return
        for path in self._files:
            yield from self._lines(path) if _is_jsonl(path) else self._text(path, None, 0, None)

    def _split(self) -> str:
        """Return the split of the next document: of n documents, val gets the integer part of n * val_fraction."""
        before, after = int(self.documents * self._val_fraction), int((self.documents + 1) * self._val_fraction)
        self.documents += 1
        return "val" if after > before else "train"

    def _text(self, path: Path, split: str | None, start: int, stop: int | None) -> Iterator[Passage]:
        with _open(path) as file:
            file.seek(start)
            blocks = iter(lambda: file.read(_BLOCK_BYTES if stop is None else min(_BLOCK_BYTES, stop - file.tell())), b"")
            text = next(blocks, b"")
            if not text:
                self.empty += 1
                return
            split = split or self._split()
            for block in blocks:
                if end := self._tokenizer.cut(text):
                    yield Passage(split, text[:end], False, str(path))
                text = text[end:] + block
                if len(text) > _MAX_UNCUT_BYTES:
                    happened = f"{path} has {_MAX_UNCUT_BYTES:,} bytes without a line break or a word break"
                    raise DataError(happened=happened, expected="text with lines or words", fix="tokenizer=byte")
            yield Passage(split, text, True, str(path))

    def _lines(self, path: Path) -> Iterator[Passage]:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"].encode("utf-8")
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    happened = f"{where} is not a document: {type(error).__name__}: {error}"
                    raise DataError(happened=happened, expected='{"text": "..."} on every line') from None
                if text:
                    yield Passage(self._split(), text, True, where)
                else:
                    self.empty += 1

    def _encode(self, passage: Passage) -> Tokens:
        try:
            return self._tokenizer.encode(passage.text)
        except UnicodeDecodeError as error:
            happened = f"{passage.where} is not UTF-8: {error.reason}, {passage.text[error.start : error.start + 4]!r}"
            fix = f"iconv -f LATIN1 -t UTF-8 {passage.where}, or tokenizer=byte"
            raise DataError(happened=happened, expected=f"UTF-8, which {self._tokenizer.name} needs", fix=fix) from None

    def _require_val(self, documents: int) -> None:
        if self._val_fraction > 0 and int(documents * self._val_fraction) == 0:
            happened = f"{self._val_fraction:g} of {plural(documents, 'document')} is less than one"
            fix = "a larger val_fraction, or val_fraction=0 and runs with data.eval=null"
            raise ConfigError(key="val_fraction", happened=happened, expected="at least one document in the split val", fix=fix)


def _is_jsonl(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _middle(path: Path, val_fraction: float) -> int:
    """Return the byte where the split val begins in a text; val gets the text's end. It is after the end of a line, if there is one."""
    with _open(path) as file:
        size = file.seek(0, os.SEEK_END)
        wanted = int(size * (1 - val_fraction))
        file.seek(wanted)
        following = file.read(_BLOCK_BYTES)
    offset = following.find(b"\n") + 1
    if offset == 0:
        offset = next((offset for offset, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)  # not inside a character of UTF-8
    if not 0 < wanted + offset < size:
        happened = f"{val_fraction:g} of the {size} bytes of {path} has no whole line"
        fix = "a larger val_fraction, or val_fraction=0 and runs with data.eval=null"
        raise ConfigError(key="val_fraction", happened=happened, expected="text in both splits", fix=fix)
    return wanted + offset
