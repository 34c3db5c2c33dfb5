"""Documents of different lengths, packed whole into windows of one length.

Shapes: N documents, P pieces (documents, the long ones cut), B windows in a batch, T tokens.
"""

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.data.token_files import TokenSource
from ddp_train.data.tokens.token_shards import TokenDocuments
from ddp_train.errors import DataError
from ddp_train.interfaces import Indices

IGNORE_INDEX = -100  # a target that counts nowhere: the fact `ignore_index`, which the objective takes
logger = logging.getLogger(__name__)


class DocumentSource(TokenSource):
    """The facts of a data set of whole documents, whose targets may be `IGNORE_INDEX`."""

    argument_ranges: ClassVar = {"context_length": {"min": 1}}
    _tokens: TokenDocuments

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**super().facts, "ignore_index": IGNORE_INDEX}


class PackedTokens(DocumentSource):
    """Windows of T + 1 tokens that hold documents whole, so that few are cut and little is padding. Sample i is window i.

    A document longer than a window is cut into windows that share one token, and its rest is packed like a document. Every token of a
    document but its first is thus a target exactly once per epoch, given all of the document before it, or of its cut. `batch` gives
    tokens [B, T] and, one further, targets [B, T]; the target is `IGNORE_INDEX` at padding and where it belongs to another document than
    the token. Attention is not told: a token sees all that stands before it in the window, other documents and their `end_of_text` too.

    The packing depends on the documents' lengths and on T alone, and is made at each start: 8 bytes per piece and per window on a rank.

    Args:
        root, split, context_length: as for `TokenFiles`.

    Source: Ding et al. 2024, "Fewer truncations improve language modeling", arXiv:2404.10830 (best-fit packing).
    """

    def __init__(self, root: str, split: str = "train", *, context_length: int) -> None:
        self._tokens, self._context_length = TokenDocuments(root, split), context_length
        lengths = TokenDocuments(root, split).lengths  # of another instance: this one would keep them
        require_targets(lengths, root, split)
        documents, starts, sizes = cut(lengths, context_length)
        bins = best_fit_decreasing(sizes, context_length + 1)
        by_bin = np.argsort(bins, kind="stable")  # in a window documents keep their order: a place in it says nothing of the length
        # Tensors: loader workers get them through shared memory, once for all of them.
        self._piece_document, self._piece_start = _compact(documents[by_bin]), _compact(starts[by_bin])
        self._first_piece = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.bincount(bins).cumsum()]))
        counting = 100 * int((sizes - 1).sum()) / (len(self) * context_length)
        logger.info("%s: %d documents in %d windows; %.2f%% of the positions count", split, len(lengths), len(self), counting)

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._context_length + 1
        window_BS = np.full((len(indices), size), self._tokens.index.end_of_text, np.int64)
        counts_BS = np.zeros((len(indices), size), np.bool_)  # whether the token is a target
        first_piece, document, start = self._first_piece.numpy(), self._piece_document.numpy(), self._piece_start.numpy()
        for window, counts, index in zip(window_BS, counts_BS, indices, strict=True):
            filled = 0
            for piece in range(first_piece[index], first_piece[index + 1]):
                tokens = self._tokens.read(int(document[piece]))[start[piece] : start[piece] + size]
                end = filled + len(tokens)
                window[filled:end] = tokens
                counts[filled + 1 : end] = True
                filled = end
        targets_BT = np.where(counts_BS[:, 1:], window_BS[:, 1:], IGNORE_INDEX)
        return torch.from_numpy(window_BS[:, :-1].copy()), torch.from_numpy(targets_BT)


def require_targets(lengths: NDArray[np.int64], root: str, split: str) -> None:
    if not (lengths > 1).any():
        happened = f"the {len(lengths)} documents of the split {split} in {root} have no token before their end"
        fix = "more text, or without evaluation: data.eval=null" if split == "val" else "more text"
        raise DataError(key="data.root", happened=happened, expected="at least one document with a text", fix=fix)


def cut(lengths: NDArray[np.int64], context_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces of at most T + 1 tokens; the last token of one is the first of the next. Of a single token, none is left.

    Returns for each piece its document, its first token in there and its number of tokens, at least 2; each of shape [P].
    """
    pieces = -(-(lengths - 1) // context_length)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    starts = (np.arange(len(documents)) - np.repeat(pieces.cumsum() - pieces, pieces)) * context_length
    return documents, starts, np.minimum(lengths[documents] - starts, context_length + 1)


def best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Put items into bins: the largest first, each into the fullest bin that has room for it.

    Items of one size are handled together, and so are bins with the same room: the fullest bin with room for an item takes as many of that
    size as it can. So numpy moves N items, and Python takes one step for each pair of a size and a room that meet.

    `sizes`: from 1 to `capacity`, shape [N].

    Returns the bin of each item, shape [N]; bins are numbered from 0 without a gap.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms" (11/9 of the optimum).
    """
    items = np.argsort((capacity - sizes).astype(np.min_scalar_type(capacity)), kind="stable")  # of 16 bits: by radix, in O(N)
    counts = np.bincount(sizes)
    bins = np.empty(len(sizes), np.int64)
    parts_with: dict[int, list[NDArray[np.int64]]] = {}  # room -> the bins that have it, in parts
    is_a_room = np.zeros(capacity + 1, np.bool_)
    num_bins = placed = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        fullest_first = size + np.flatnonzero(is_a_room[size:])
        for room in map(int, chain(fullest_first, [capacity])):  # at last into new bins, which have all the room
            per_bin = room // size
            wanted = -(-left // per_bin)
            if room == capacity:
                used = np.arange(num_bins, num_bins + wanted)
                num_bins += wanted
            else:
                used = _pop_bins(parts_with[room], wanted)
                is_a_room[room] = bool(parts_with[room])
            fitting = min(left, per_bin * len(used))
            bins[items[placed : placed + fitting]] = np.repeat(used, per_bin)[:fitting]
            full, in_last = divmod(fitting, per_bin)
            for rest, part in ((room - per_bin * size, used[:full]), (room - in_last * size, used[full:])):
                if len(part):
                    parts_with.setdefault(rest, []).append(part)
                    is_a_room[rest] = True
            placed, left = placed + fitting, left - fitting
            if not left:
                break
    return bins


def _pop_bins(parts: list[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    taken = []
    while count and parts:
        part = parts.pop()
        taken.append(part[:count])
        if len(part) > count:
            parts.append(part[count:])
        count -= len(taken[-1])
    return np.concatenate(taken)


def _compact(values: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32) if values.max() < 2**31 else values)
