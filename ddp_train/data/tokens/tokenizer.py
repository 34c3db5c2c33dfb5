"""Turn text into tokens: byte by byte, or with an encoding of tiktoken. Imports no torch."""

from __future__ import annotations

import re
from typing import Any, Protocol

import numpy as np

from ddp_train.data.tokens.token_shards import Tokens
from ddp_train.errors import ConfigError

_CUT = re.compile(r"(?<=\S\n)(?=[^\W\d_])|(?= [^\W\d_])")
_SEARCH_BYTES = 1 << 16
_CHARACTER_BYTES = 4  # the longest in UTF-8


class Tokenizer(Protocol):
    """What makes tokens of text; used by several threads at a time."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text in UTF-8.

        Raises:
            UnicodeDecodeError: it is not UTF-8, which this tokenizer needs.
        """

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
    """An encoding of tiktoken. Words like <|endoftext|> in a text are text.

    Args:
        name: of the encoding: gpt2, cl100k_base, o200k_base, ...
    """

    def __init__(self, name: str) -> None:
        self.name = f"tiktoken:{name}"
        self._encoding = _encoding(name)
        self.vocab_size = self._encoding.n_vocab
        try:
            self.end_of_text = self._encoding.eot_token
        except KeyError:
            raise ConfigError(
                key="tokenizer",
                happened=f"the encoding {name} has no <|endoftext|>",
                expected="one that has",
                fix="tokenizer=tiktoken:gpt2",
            ) from None

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
            places = [found.start() for found in _CUT.finditer(piece, _CHARACTER_BYTES if start else 0)]
            if places:
                return start + len(piece[: places[-1]].encode("utf-8", errors="surrogateescape"))
        return 0


def make_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer that is called `byte` or `tiktoken:NAME`."""
    kind, _, name = text.partition(":")
    if text == "byte":
        return ByteTokenizer()
    if kind == "tiktoken" and name:
        return TiktokenTokenizer(name)
    raise ConfigError(
        key="tokenizer", happened=f"there is no tokenizer {text!r}", expected="byte or tiktoken:NAME", fix="tokenizer=tiktoken:gpt2"
    )


def _encoding(name: str) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(
            key="tokenizer",
            happened=f"tiktoken:{name} needs the package tiktoken",
            expected="it installed",
            fix='pip install "ddp-train[text]", or tokenizer=byte',
        ) from None
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # it fetches the vocabulary when it is first used
        raise ConfigError(
            key="tokenizer",
            happened=f"tiktoken cannot fetch the vocabulary of {name}: {type(error).__name__}: {error}",
            expected="a network, or the vocabulary in the folder TIKTOKEN_CACHE_DIR",
            fix=f"python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")' where there is a network, with TIKTOKEN_CACHE_DIR=FOLDER; "
            "copy FOLDER here and set it too; or tokenizer=byte",
        ) from None
    except ValueError as error:
        if name in tiktoken.list_encoding_names():
            raise
        raise ConfigError(
            key="tokenizer",
            happened=f"tiktoken has no encoding {name!r}",
            expected=f"one of {', '.join(tiktoken.list_encoding_names())}",
            fix="tokenizer=tiktoken:gpt2",
        ) from error
