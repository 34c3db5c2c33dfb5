import pickle

import numpy as np
import pytest
import torch

from ddp_train.config.targets.target import check_target
from ddp_train.data import char_text
from ddp_train.data.char_text import CharText
from ddp_train.errors import DataError
from ddp_train.interfaces import DataSource
from tests.unit.data_files import TEXT, write_text


def test_it_is_a_data_source_with_facts(tmp_path):
    data = CharText(str(write_text(tmp_path / "a.txt")), context_length=16)
    assert isinstance(data, DataSource)
    assert data.facts == {"vocab_size": len(set(TEXT)), "context_length": 16, "bytes_per_token": 1.0}


def test_tokens_are_the_ranks_of_bytes_and_targets_come_one_later(tmp_path):
    data = CharText(str(write_text(tmp_path / "a.txt", "abcabd" * 10)), context_length=4)
    tokens, targets = data.batch(np.asarray([0, 2]))
    assert tokens.tolist() == [[0, 1, 2, 0], [2, 0, 1, 3]]
    assert targets.tolist() == [[1, 2, 0, 1], [0, 1, 3, 0]]
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("stride", [1, 3, 16, 1000])
def test_windows_start_every_stride_and_end_before_the_split_does(tmp_path, stride):
    path = str(write_text(tmp_path / "a.txt"))
    train, val = CharText(path, "train", context_length=16, stride=stride), CharText(path, "val", context_length=16, stride=stride)
    boundary = int(len(TEXT) * 0.9)
    for data, part in ((train, TEXT[:boundary]), (val, TEXT[boundary:])):
        starts = range(0, len(part) - 16, stride)
        assert len(data) == len(starts) == (len(part) - 1 - 16) // stride + 1
        tokens, targets = data.batch(np.arange(len(data)))
        assert [data.decode(row) for row in tokens] == [part[start : start + 16] for start in starts]
        assert [data.decode(row) for row in targets] == [part[start + 1 : start + 17] for start in starts]


def test_the_vocabulary_is_that_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(char_text, "_CHUNK_BYTES", 7)
    path = str(write_text(tmp_path / "a.txt", "ab" * 100 + "z"))
    for split in ("train", "val"):
        assert CharText(path, split, context_length=4).facts["vocab_size"] == 3


def test_other_bytes_than_ascii_are_tokens_too(tmp_path):
    data = CharText(str(write_text(tmp_path / "a.txt", "é" * 100)), context_length=4)
    assert data.facts["vocab_size"] == 2
    assert data.decode([1, 0]) == "é"  # bytes c3 a9
    assert data.decode([0]) == "�"


def test_a_window_is_the_same_in_every_batch(tmp_path):
    data = CharText(str(write_text(tmp_path / "a.txt")), context_length=8)
    whole = data.batch(np.arange(50))
    assert torch.equal(torch.cat([data.batch(np.asarray([index]))[0] for index in range(50)]), whole[0])


def test_pickling_maps_the_file_again_instead_of_copying_it(tmp_path):
    data = CharText(str(write_text(tmp_path / "a.txt", TEXT * 100)), "val", context_length=64)
    pickled = pickle.dumps(data)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert len(again) == len(data)
    assert torch.equal(again.batch(np.arange(9))[1], data.batch(np.arange(9))[1])


def test_the_shortest_text_that_fits_gives_one_window(tmp_path):
    path = str(write_text(tmp_path / "a.txt", "x" * 100))
    assert len(CharText(path, "val", context_length=9)) == 1
    with pytest.raises(DataError, match=r"10 of the file's 100 bytes\n.*at least 11") as caught:
        CharText(path, "val", context_length=10)
    assert caught.value.key == "data.path"


def test_files_that_cannot_be_text_are_clear_errors(tmp_path):
    write_text(tmp_path / "empty.txt", "")
    for name, message in {"nowhere.txt": "No such file", ".": "Is a directory", "empty.txt": "is empty"}.items():
        with pytest.raises(DataError, match=message) as caught:
            CharText(str(tmp_path / name))
        assert caught.value.key == "data.path"
        assert "data.path=" in caught.value.fix


@pytest.mark.parametrize("changes", [{"context_length": 0}, {"stride": 0}, {"val_fraction": 1.0}])
def test_a_senseless_argument_is_named(changes):
    (problem,) = check_target({"_target_": "ddp_train.data.char_text.CharText", "path": "a.txt", **changes}, "data")
    assert problem.key == f"data.{next(iter(changes))}"
