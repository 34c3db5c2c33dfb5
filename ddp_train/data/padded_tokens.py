"""Documents of different lengths, one per sample, padded to the longest of their batch.

Shapes: N documents, B documents in a batch, T tokens.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.data.packed_tokens import IGNORE_INDEX, DocumentSource, require_targets
from ddp_train.data.tokens.token_shards import TokenDocuments
from ddp_train.interfaces import Indices


class PaddedTokens(DocumentSource):
    """Sample i is document i, cut after T + 1 tokens.

    `batch` gives tokens [B, T'] and, one further, targets [B, T'], where T' is the longest of the batch; the target is `IGNORE_INDEX` at
    padding. No document sees another, and causal attention no padding, so a document's loss does not depend on what it is batched with.
    With `loader.bucket_batches` batches hold documents of similar `lengths`, and little is padding.

    Args: as for `PackedTokens`.
    """

    def __init__(self, root: str, split: str = "train", *, context_length: int) -> None:
        self._tokens, self._context_length = TokenDocuments(root, split), context_length
        require_targets(self.lengths, root, split)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, at most T + 1, shape [N]."""
        return np.minimum(self._tokens.lengths, self._context_length + 1)

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, T'] and targets [B, T'], int64; T' is at least 1 and at most T."""
        documents = [self._tokens.read(int(index))[: self._context_length + 1] for index in indices]
        sizes_B = np.asarray([len(tokens) for tokens in documents])
        width = max(int(sizes_B.max()) - 1, 1)
        padded_BS = np.full((len(documents), width + 1), self._tokens.index.end_of_text, np.int64)
        for row, tokens in zip(padded_BS, documents, strict=True):
            row[: len(tokens)] = tokens
        counts_BT = np.arange(width) < sizes_B[:, None] - 1
        targets_BT = np.where(counts_BT, padded_BS[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(padded_BS[:, :-1].copy()), torch.from_numpy(targets_BT)

    def __getstate__(self) -> dict[str, Any]:
        # For loader workers: the lengths decide which samples make a batch, which is not their business.
        return {name: value for name, value in self.__dict__.items() if name != "lengths"}
