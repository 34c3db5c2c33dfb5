"""Packing: nothing lost, nothing learned across documents, little padding, and always the same."""

from __future__ import annotations

import pickle
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.data.packed_tokens import IGNORE_INDEX, PackedTokens, best_fit_decreasing, cut
from ddp_train.errors import DataError
from ddp_train.interfaces import DataSource
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from tests.unit.data_files import write_tokens

END = 256
LENGTHS = [3, 0, 16, 1, 40, 15, 7, 17, 2, 33, 5, 5, 0, 64, 16, 11]
"""Tokens without the end; windows of 16: shorter, as long, one longer, several times as long, empty."""


def documents(lengths: list[int]) -> list[list[int]]:
    """Return documents in which no token occurs twice; `END` follows each."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for length, end in zip(lengths, ends.tolist(), strict=True)]


def packed(folder: Path, lengths: list[int] = LENGTHS, *, context_length: int = 16) -> PackedTokens:
    whole = documents(lengths)
    write_tokens(folder, {"train": [whole[: len(whole) // 2], whole[len(whole) // 2 :]]})
    return PackedTokens(str(folder), context_length=context_length)


def everything(data: PackedTokens) -> tuple[Tensor, Tensor]:
    return data.batch(np.arange(len(data)))


def test_it_is_a_data_source_with_facts(tmp_path: Path) -> None:
    data = packed(tmp_path)
    assert isinstance(data, DataSource)
    bytes_per_token = sum(LENGTHS) / (sum(LENGTHS) + len(LENGTHS))
    assert data.facts == {"vocab_size": 257, "context_length": 16, "ignore_index": IGNORE_INDEX, "bytes_per_token": bytes_per_token}
    for values in everything(data):
        assert (values.dtype, values.shape, values.is_contiguous()) == (torch.int64, (len(data), 16), True)


@pytest.mark.parametrize("context_length", [1, 2, 5, 16, 64, 1000])
def test_every_token_of_a_document_but_its_first_is_a_target_once_and_no_other(tmp_path: Path, context_length: int) -> None:
    data = packed(tmp_path, context_length=context_length)
    tokens, targets = everything(data)
    counts = targets != IGNORE_INDEX
    ended = [[*document, END] for document in documents(LENGTHS)]
    pairs = sorted(pair for document in ended for pair in pairwise(document))
    assert sorted(zip(tokens[counts].tolist(), targets[counts].tolist(), strict=True)) == pairs
    goes_on = counts[:, :-1]  # what is to be predicted is what stands next: a document lies in one piece, in its order
    assert torch.equal(targets[:, :-1][goes_on], tokens[:, 1:][goes_on])


def test_a_document_that_fits_is_not_cut(tmp_path: Path) -> None:
    tokens, targets = everything(packed(tmp_path))
    window_of = {token: number for number, window in enumerate(tokens.tolist()) for token in window}
    window_of |= {token: number for number, window in enumerate(targets.tolist()) for token in window}
    for document in documents(LENGTHS):
        if len(document) < 17:
            assert len({window_of[token] for token in document}) <= 1


def test_a_window_is_the_same_in_every_batch_and_at_every_start(tmp_path: Path) -> None:
    data = packed(tmp_path)
    again = PackedTokens(str(tmp_path), context_length=16)
    for whole, alone in zip(
        everything(data), zip(*(again.batch(np.asarray([index])) for index in range(len(data))), strict=True), strict=True
    ):
        assert torch.equal(whole, torch.cat(alone))


def test_the_packing_is_the_textbooks() -> None:
    def one_by_one(sizes: list[int], capacity: int) -> list[int]:
        rooms: list[int] = []
        for size in sorted(sizes, reverse=True):
            room = min((room for room in rooms if room >= size), default=capacity)
            if room in rooms:
                rooms.remove(room)
            rooms.append(room - size)
        return sorted(rooms)

    generator = np.random.default_rng(0)
    for capacity in range(1, 80):
        sizes = np.minimum(generator.lognormal(2, 1, 150).astype(np.int64) + 1, capacity)
        bins = best_fit_decreasing(sizes, capacity)
        assert sorted(capacity - np.bincount(bins, sizes).astype(np.int64)) == one_by_one(sizes.tolist(), capacity)


def test_documents_of_usual_lengths_leave_almost_no_padding() -> None:
    """Against what is simplest, filling windows in the order of the documents, and one document per window."""
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(np.int64) + 2
    _, _, sizes = cut(lengths, 1024)
    targets = (sizes - 1).sum()
    in_order, room = 0, 0
    for size in sizes.tolist():
        if size > room:
            in_order, room = in_order + 1, 1025
        room -= size
    packed, naive, alone = (targets / (1024 * windows) for windows in (best_fit_decreasing(sizes, 1025).max() + 1, in_order, len(sizes)))
    assert packed > 0.995
    assert packed > naive + 0.15 > alone + 0.3


def test_loader_workers_share_the_packing_and_read_the_same(tmp_path: Path) -> None:
    data = packed(tmp_path)
    copied = {name: value for name, value in vars(data).items() if not isinstance(value, Tensor)}  # tensors go through shared memory
    assert len(pickle.dumps(copied)) < 1000

    def read(num_workers: int) -> list[Tensor]:
        order = SampleOrder(Shuffled(len(data), seed=0), global_batch_size=4, drop_last=False)
        loader = PositionedTrainLoader(data, order, rank=0, world_size=1, grad_accum_steps=1, num_workers=num_workers, pin_memory=False)
        return [values for micro_batch in islice(loader.micro_batches(0), 6) for values in micro_batch.batch]

    assert all(torch.equal(left, right) for left, right in zip(read(0), read(2), strict=True))


def test_what_cannot_be_packed_is_a_clear_error(tmp_path: Path) -> None:
    write_tokens(tmp_path, {"train": [[[], []]], "val": []})
    with pytest.raises(DataError, match=r"the 2 documents of the split train .* no token before their end"):
        PackedTokens(str(tmp_path), context_length=4)
    with pytest.raises(DataError, match=r"the 0 documents of the split val") as caught:
        PackedTokens(str(tmp_path), "val", context_length=4)
    assert "data.eval=null" in caught.value.fix
