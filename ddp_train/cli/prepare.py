"""`ddp-train prepare`: write token shards of text, in memory that does not grow with the text; or plain files of pickled weights."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import BinaryIO, cast

from ddp_train.cli.saved_run import parse_words
from ddp_train.config.spelling import nearest
from ddp_train.data.tokens.token_shards import INDEX, TokenIndex, Tokens
from ddp_train.data.tokens.token_writer import Tokenizer, TokenWriter, make_tokenizer
from ddp_train.errors import DONE, ConfigError, DataError, plural
from ddp_train.launch.job_runner import JobRunner
from ddp_train.system.folder_lock import hold

_WEIGHTS = """ddp-train prepare weights FOLDER to=FILE.safetensors --unpickle

  FOLDER         a folder of torch.distributed.checkpoint (DCP), as torchtitan and FSDP scripts write it; weights below "model", or all
  to             new file, for init_from= of later runs; only one tensor at a time is in memory
  --unpickle     read the folder's metadata, a pickle: this runs any code that its writer has put there. Use it only if you trust the writer
"""
USAGE = f"""ddp-train prepare tokens FILE... to=FOLDER [key=value ...]

  FILE           text: the whole file is one document; .jsonl: every line is one, {{"text": "..."}}; either with .gz.
                 A folder means all .txt and .jsonl files below it, in the order of their names.
  to             new folder for the tokens; the data.root of later runs
  tokenizer      byte (256 byte values, nothing to install) | tiktoken:NAME, as tiktoken:gpt2      default: byte
  val_fraction   share of the documents, evenly spread, for the split val; of a single text file its end; 0: none      default: 0.01
  shard_tokens   start a new file of tokens after the document that reaches this number      default: 268435456

{_WEIGHTS}"""

_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
_NO_TEXT = (".json", ".parquet", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz")
_BLOCK_BYTES = 1 << 20  # of text that is encoded at a time
_MAX_UNCUT_BYTES = 1 << 26  # without a place to cut
_PRINT_EVERY_S = 10.0


def prepare(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train prepare tokens FILE... to=FOLDER`: make token shards of text; or `prepare weights`."""
    if arguments[:1] == ["weights"]:
        _prepare_weights(arguments[1:])
    elif arguments[:1] == ["tokens"]:
        _prepare_tokens(_Request.parse(arguments[1:]))
    else:
        happened = f"prepare has no {arguments[0]!r}" if arguments else "no input was given"
        raise ConfigError(happened=happened, expected="tokens or weights", fix="ddp-train prepare tokens FILE... to=FOLDER")
    return DONE


@dataclass(frozen=True)
class _Request:
    files: tuple[Path, ...]
    folder: Path
    tokenizer: str
    val_fraction: float
    shard_tokens: int

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> _Request:
        options = {"to": "", "tokenizer": "byte", "val_fraction": "0.01", "shard_tokens": str(1 << 28)}
        typed, words = parse_words(arguments, USAGE, dict.fromkeys(options, "VALUE"), most=None)
        options |= typed
        for word in (word for word in words if not Path(word).exists()):
            name, sign, value = word.partition("=")
            close = nearest(name, options) if sign else ""
            expected = f"text or .jsonl files, folders of them, or {', '.join(options)}"
            fix = f"did you mean {close}={value}?" if close else "ddp-train prepare --help"
            raise ConfigError(happened=f"there is no file {word}", expected=expected, fix=fix)
        if not options["to"]:
            raise ConfigError(happened="to=FOLDER is missing", expected=USAGE.partition("\n")[0])
        files = tuple(file for word in words for file in _files(Path(word)))
        val_fraction = _number(options, "val_fraction", "at least 0 and below 1", lambda value: 0 <= value < 1)
        shard_tokens = _number(options, "shard_tokens", "a whole number, at least 1", lambda value: value >= 1 and value % 1 == 0)
        return cls(files, Path(options["to"]).expanduser(), options["tokenizer"], val_fraction, int(shard_tokens))


@dataclass(frozen=True)
class _Passage:
    """A document, or a part of a long one."""

    split: str
    text: bytes
    ends_document: bool
    where: str  # for errors


class _Corpus:
    """Yields the documents of all files, in order, each with its split. Empty ones are left out and counted."""

    def __init__(self, request: _Request, tokenizer: Tokenizer) -> None:
        self._files, self._val_fraction, self._tokenizer = request.files, request.val_fraction, tokenizer
        self.documents = self.empty = 0

    def passages(self) -> Iterator[_Passage]:
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

    def _text(self, path: Path, split: str | None, start: int, stop: int | None) -> Iterator[_Passage]:
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
                    yield _Passage(split, text[:end], False, str(path))
                text = text[end:] + block
                if len(text) > _MAX_UNCUT_BYTES:
                    happened = f"{path} has {_MAX_UNCUT_BYTES:,} bytes without a line break or a word break"
                    raise DataError(happened=happened, expected="text with lines or words", fix="tokenizer=byte")
            yield _Passage(split, text, True, str(path))

    def _lines(self, path: Path) -> Iterator[_Passage]:
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
                    yield _Passage(self._split(), text, True, where)
                else:
                    self.empty += 1


def _prepare_tokens(request: _Request) -> None:
    tokenizer = make_tokenizer(request.tokenizer)
    request.folder.mkdir(parents=True, exist_ok=True)
    hold(request.folder, key="to")
    if (request.folder / INDEX).exists():
        happened, expected = f"{request.folder} has an {INDEX} already", "a folder without one; nothing is written over"
        raise ConfigError(key="to", happened=happened, expected=expected, fix="another folder, or delete that one")
    corpus = _Corpus(request, tokenizer)
    if request.val_fraction > 0 and len(request.files) > 1 and not any(_is_jsonl(path) for path in request.files):
        _require_val(request, len(request.files))  # before the work, where it can be known
    with TokenWriter(
        request.folder,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        end_of_text=tokenizer.end_of_text,
        splits=("train", "val"),
        shard_tokens=request.shard_tokens,
    ) as writer:
        num_bytes = num_tokens = 0
        began = printed = time.monotonic()
        for passage, tokens in _encoded(corpus.passages(), tokenizer):
            writer.append(passage.split, tokens, num_bytes=len(passage.text), ends_document=passage.ends_document)
            num_bytes, num_tokens = num_bytes + len(passage.text), num_tokens + len(tokens)
            if time.monotonic() > printed + _PRINT_EVERY_S:
                printed = time.monotonic()
                rate = num_bytes / 1e6 / (printed - began)
                print(f"{num_bytes / 1e6:,.0f} MB of text, {num_tokens:,} tokens, {rate:.0f} MB/s", flush=True)
        if not num_tokens:
            raise DataError(happened="there is no text in these files", expected="at least one document that is not empty")
        if request.val_fraction > 0 and corpus.documents:
            _require_val(request, corpus.documents)
        index = writer.finish()
    _print_summary(request, index, corpus.empty)


def _require_val(request: _Request, documents: int) -> None:
    if int(documents * request.val_fraction) == 0:
        happened = f"{request.val_fraction:g} of {plural(documents, 'document')} is less than one"
        larger = f"val_fraction={ceil(1000 / documents) / 1000:g}, or " if documents > 1 else ""
        fix = f"{larger}val_fraction=0 and runs with data.eval=null"
        raise ConfigError(key="val_fraction", happened=happened, expected="at least one document in the split val", fix=fix)


def _encoded(passages: Iterable[_Passage], tokenizer: Tokenizer) -> Iterator[tuple[_Passage, Tokens]]:
    """Encode in threads, in order; tiktoken does it outside the interpreter's lock."""

    def encode(group: list[_Passage]) -> list[tuple[_Passage, Tokens]]:
        return [(passage, _encode(passage, tokenizer)) for passage in group]

    threads = len(os.sched_getaffinity(0))
    waiting: deque[Future[list[tuple[_Passage, Tokens]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for group in _groups(passages):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _groups(passages: Iterable[_Passage]) -> Iterator[list[_Passage]]:
    """Group short documents: a thread for each would cost more than to encode it."""
    group: list[_Passage] = []
    num_bytes = 0
    for passage in passages:
        group.append(passage)
        num_bytes += len(passage.text)
        if num_bytes >= _BLOCK_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _encode(passage: _Passage, tokenizer: Tokenizer) -> Tokens:
    try:
        return tokenizer.encode(passage.text)
    except UnicodeDecodeError as error:
        happened = f"{passage.where} is not UTF-8: {error.reason}, {passage.text[error.start : error.start + 4]!r}"
        expected = f"UTF-8, which {tokenizer.name} needs"
        raise DataError(happened=happened, expected=expected, fix=f"iconv -f LATIN1 -t UTF-8 {passage.where}, or tokenizer=byte") from None


def _print_summary(request: _Request, index: TokenIndex, empty: int) -> None:
    folder = request.folder
    print(f"tokens   {folder}: {index.tokenizer}, {index.vocab_size:,} in the vocabulary, {index.dtype}")
    for name, shards in index.splits.items():
        tokens, documents = sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
        print(f"{name:8} {tokens:,} tokens, {plural(documents, 'document')}, {plural(len(shards), 'file')}")
    if empty:
        print(f"         {plural(empty, 'empty document')} left out")
    print(f"bytes    {index.bytes_per_token:.3f} per token")
    without_val = "" if index.splits["val"] else " data.eval=null"
    print(f"train    ddp-train data=token_files data.root={folder}{without_val} model=gpt objective=language_modeling")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES) and file.is_file())
        if not files:
            raise DataError(happened=f"the folder {path} has no text", expected=f"files *{', *'.join(_SUFFIXES)}")
        return files
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix in _NO_TEXT:
        raise DataError(happened=f"{path} is a {suffix} file", expected="text, or .jsonl with one document a line; unpacked, or as .gz")
    return [path]


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


def _number(options: dict[str, str], name: str, expected: str, is_good: Callable[[float], bool]) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = float("nan")
    if not is_good(value):
        raise ConfigError(key=name, happened=f"is {options[name]}", expected=expected)
    return value


def _prepare_weights(arguments: Sequence[str]) -> None:
    options, (word,) = parse_words(arguments, _WEIGHTS, {"to": "FILE", "--unpickle": ""})
    folder, to = Path(word), Path(options.get("to", ""))
    if not (folder / ".metadata").is_file():
        raise ConfigError(happened=f"{folder} is not a folder of torch.distributed.checkpoint", expected="a folder with a file .metadata")
    if to.suffix != ".safetensors":
        raise ConfigError(key="to", happened=f"is {options.get('to')}", expected="a new file.safetensors", fix="to=FILE.safetensors")
    if to.exists():
        raise ConfigError(key="to", happened=f"{to} exists; nothing is written over", expected="a new path")
    if "--unpickle" not in options:
        happened = f"is not given, and {folder / '.metadata'} is a pickle: reading it runs any code that its writer put there"
        fix = f"ddp-train prepare weights {shlex.join(arguments)} --unpickle"
        raise ConfigError(key="--unpickle", happened=happened, expected="--unpickle, if you trust the writer", fix=fix)
    from ddp_train.training.inference.export import from_dcp  # imports torch

    for line in from_dcp(folder, to):
        print(line)
    print(f"written  {to}\nuse      init_from={shlex.quote(str(to))}")
