"""Windows over prepared tokens of any size, which are mapped and not loaded (`ddp-train prepare tokens` makes them).

Shapes: B samples, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ddp_train.data.tokens.token_shards import TokenShards
from ddp_train.errors import DataError
from ddp_train.interfaces import DataSource, Indices


class TokenSource(DataSource):
    """The facts, fingerprint and meaning of a data set of prepared tokens."""

    gives_pairs = True
    _tokens: TokenShards
    _context_length: int

    @property
    def facts(self) -> Mapping[str, Any]:
        index = self._tokens.index
        facts = {"vocab_size": index.vocab_size, "context_length": self._context_length}
        return facts if index.bytes_per_token is None else {**facts, "bytes_per_token": index.bytes_per_token}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self._tokens.fingerprint

    @property
    def meaning(self) -> Mapping[str, Any]:
        index = self._tokens.index
        return {"tokenizer": index.tokenizer, "vocab_size": index.vocab_size, "end_of_text": index.end_of_text}


class TokenFiles(TokenSource):
    """Windows of `context_length` tokens. `batch` gives tokens [B, T] and, one further, targets [B, T].

    A split is one stream: windows cross from a document into the next, with `end_of_text` between them, and from a shard into the next,
    so that no token is lost at a border and the samples do not depend on how the data was cut into shards.

    Args:
        root: folder that `ddp-train prepare tokens` has made.
        split: "train" or "val".
        context_length: T.
        stride: tokens from one window's start to the next; None is `context_length`, every token once; 1 is every window.
    """

    argument_ranges: ClassVar = {"context_length": {"min": 1}, "stride": {"min": 1}}

    def __init__(self, root: str, split: str = "train", *, context_length: int, stride: int | None = None) -> None:
        stride = context_length if stride is None else stride
        self._tokens, self._context_length, self._stride = TokenShards(root, split), context_length, stride
        if self._tokens.num_tokens <= context_length:
            happened = f"the {split} split of {root} has {self._tokens.num_tokens} tokens"
            expected = f"at least {context_length + 1}: a window of data.context_length={context_length} and the token after it"
            fix = "more text, a shorter data.context_length, or for the split val data.eval=null"
            raise DataError(key="data.root", happened=happened, expected=expected, fix=fix)

    def __len__(self) -> int:
        return (self._tokens.num_tokens - 1 - self._context_length) // self._stride + 1

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, T] and targets [B, T], int64; window i starts at i * `stride` of the split's stream."""
        windows = self._tokens.windows(indices * self._stride, self._context_length + 1)
        tokens_BT, targets_BT = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT)
