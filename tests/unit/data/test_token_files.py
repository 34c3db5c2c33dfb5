import pickle

import numpy as np
import pytest
import torch

from ddp_train.config.targets.target import check_target
from ddp_train.data.token_files import TokenFiles
from ddp_train.errors import DataError
from ddp_train.interfaces import DataSource
from tests.unit.data_files import write_tokens

SHARDS = [[list(range(50)), list(range(7))], [list(range(100, 230))]]
STREAM = [token for documents in SHARDS for document in documents for token in (*document, 256)]


@pytest.fixture
def root(tmp_path):
    return str(write_tokens(tmp_path / "tokens", {"train": SHARDS, "val": []}))


def test_it_is_a_data_source_with_facts(root):
    data = TokenFiles(root, context_length=16)
    assert isinstance(data, DataSource)
    assert data.facts == {"vocab_size": 257, "context_length": 16, "bytes_per_token": pytest.approx(187 / 190)}


@pytest.mark.parametrize("stride", [None, 1, 5, 1000])
def test_windows_start_every_stride_also_across_shards_and_targets_come_one_later(root, stride):
    data = TokenFiles(root, context_length=16, stride=stride)
    starts = range(0, len(STREAM) - 16, stride or 16)
    assert len(data) == len(starts)
    order = np.random.default_rng(0).permutation(len(starts))
    tokens, targets = data.batch(order)
    assert tokens.tolist() == [STREAM[starts[index] : starts[index] + 16] for index in order]
    assert targets.tolist() == [STREAM[starts[index] + 1 : starts[index] + 17] for index in order]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_samples_do_not_depend_on_how_the_tokens_were_cut_into_shards(root, tmp_path):
    in_one = TokenFiles(str(write_tokens(tmp_path / "one", {"train": [SHARDS[0] + SHARDS[1]]})), context_length=16, stride=3)
    data = TokenFiles(root, context_length=16, stride=3)
    assert len(data) == len(in_one)
    everyone = np.arange(len(data))
    assert torch.equal(data.batch(everyone)[1], in_one.batch(everyone)[1])


def test_pickling_maps_the_files_again(root):
    data = TokenFiles(root, context_length=16)
    before = data.batch(np.arange(4))[0]
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled).batch(np.arange(4))[0], before)


def test_the_shortest_split_that_fits_gives_one_window(root):
    assert len(TokenFiles(root, context_length=len(STREAM) - 1)) == 1
    with pytest.raises(DataError, match=r"190 tokens\n.*at least 191"):
        TokenFiles(root, context_length=len(STREAM))


def test_a_split_that_was_not_prepared_says_how_to_go_on(root):
    with pytest.raises(DataError, match=r"the val split of .* has 0 tokens(.|\n)*data.eval=null"):
        TokenFiles(root, "val", context_length=16)


@pytest.mark.parametrize("changes", [{"context_length": 0}, {"stride": 0}])
def test_a_senseless_argument_is_named(changes):
    config = {"_target_": "ddp_train.data.token_files.TokenFiles", "root": "tokens", "context_length": 16, **changes}
    (problem,) = check_target(config, "data")
    assert problem.key == f"data.{next(iter(changes))}"
