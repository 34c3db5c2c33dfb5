"""Padded documents: a sample is a document, and nothing depends on what it is batched with."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_train.data.packed_tokens import IGNORE_INDEX
from ddp_train.data.padded_tokens import PaddedTokens
from ddp_train.errors import DataError
from ddp_train.interfaces import DataSource
from ddp_train.interfaces.objective import loss_sum
from ddp_train.model.gpt import GPT
from ddp_train.objective.language_modeling import LanguageModeling
from tests.unit.data_files import write_tokens

DOCUMENTS = [[1, 2, 3], [], [4, 5, 6, 7, 8, 9], [5]]


def padded(folder: Path, *, context_length: int = 4) -> PaddedTokens:
    return PaddedTokens(str(write_tokens(folder, {"train": [DOCUMENTS[:1], DOCUMENTS[1:]]}, vocab_size=11)), context_length=context_length)


def test_a_sample_is_a_document_and_a_batch_as_long_as_its_longest(tmp_path: Path) -> None:
    data = padded(tmp_path)
    assert isinstance(data, DataSource)
    assert data.facts == {"vocab_size": 11, "context_length": 4, "ignore_index": IGNORE_INDEX, "bytes_per_token": 10 / 14}
    assert data.lengths.tolist() == [4, 1, 5, 2]
    e, x = 10, IGNORE_INDEX
    tokens, targets = data.batch(np.asarray([3, 0, 1]))
    assert tokens.tolist() == [[5, e, e], [1, 2, 3], [e, e, e]]
    assert targets.tolist() == [[e, x, x], [2, 3, e], [x, x, x]]
    tokens, targets = data.batch(np.asarray([2]))  # too long: cut, and its end is not there
    assert tokens.tolist() == [[4, 5, 6, 7]]
    assert targets.tolist() == [[5, 6, 7, 8]]
    assert (tokens.dtype, targets.dtype, tokens.is_contiguous()) == (torch.int64, torch.int64, True)


def test_a_batch_of_empty_documents_has_a_position_in_which_nothing_counts(tmp_path: Path) -> None:
    tokens, targets = padded(tmp_path).batch(np.asarray([1, 1]))
    assert tokens.tolist() == [[10], [10]]
    assert targets.tolist() == [[IGNORE_INDEX], [IGNORE_INDEX]]


def test_the_loss_of_a_document_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    data = padded(tmp_path, context_length=8)
    model = GPT(11, 8, num_layers=1, num_heads=2, width=16).double()
    objective = LanguageModeling(ignore_index=IGNORE_INDEX)
    together = loss_sum(objective, model, data.batch(np.arange(4)))
    alone = [loss_sum(objective, model, data.batch(np.asarray([index]))) for index in range(4)]
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-12)
    assert together.num_units == sum(loss.num_units for loss in alone) == sum(data.lengths - 1)


def test_it_travels_without_its_lengths(tmp_path: Path) -> None:
    data = padded(tmp_path)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert b"numpy" not in pickled
    again: PaddedTokens = pickle.loads(pickled)
    assert torch.equal(again.batch(np.arange(4))[1], data.batch(np.arange(4))[1])
    assert np.array_equal(again.lengths, data.lengths)


def test_documents_without_a_text_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token before their end"):
        PaddedTokens(str(write_tokens(tmp_path, {"train": [[[], []]]})), context_length=4)
