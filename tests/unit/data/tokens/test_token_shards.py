import json
import pickle

import numpy as np
import pytest

from ddp_train.data.tokens.token_shards import TokenDocuments, TokenShards
from ddp_train.errors import ConfigError, DataError
from tests.unit.data_files import write_tokens

RANDOM = np.random.default_rng(0)
SHARDS = [[RANDOM.integers(0, 256, size).tolist() for size in sizes] for sizes in ([40, 1, 17], [0], [3], [200, 5])]
DOCUMENTS = [[*document, 256] for documents in SHARDS for document in documents]
STREAM = np.concatenate(DOCUMENTS)


@pytest.fixture
def root(tmp_path):
    return write_tokens(tmp_path / "tokens", {"train": SHARDS, "val": [[[1, 2, 3]]]})


@pytest.mark.parametrize("length", [1, 4, 33, 100, len(STREAM)])  # the second and third shard have 1 and 4 tokens
def test_windows_are_those_of_the_stream_wherever_they_lie(root, length):
    starts = np.random.default_rng(1).permutation(len(STREAM) - length + 1)
    windows = TokenShards(root).windows(starts, length)
    assert windows.tolist() == [STREAM[start : start + length].tolist() for start in starts]


def test_one_object_gives_windows_of_several_lengths(root):
    shards = TokenShards(root)
    for length in (3, 50, 3):
        assert shards.windows(np.asarray([7]), length).tolist() == [STREAM[7 : 7 + length].tolist()]


def test_a_window_may_be_longer_than_the_memory_that_two_small_shards_lie_in(tmp_path):
    root = write_tokens(tmp_path, {"train": [[[1] * 1500]] * 2 + [[[2] * 60_000]]})
    assert TokenShards(root).windows(np.asarray([1]), 63_002).tolist() == [[*([1] * 1499), 256, *([1] * 1500), 256, *([2] * 60_000), 256]]


def test_tokens_above_65535_keep_their_value(tmp_path):
    root = write_tokens(tmp_path, {"train": [[[70_000, 1], [65_536]], [[69_999]]]}, vocab_size=100_001, dtype="uint32")
    assert TokenShards(root).windows(np.asarray([0, 3]), 4).tolist() == [[70_000, 1, 100_000, 65_536], [65_536, 100_000, 69_999, 100_000]]


def test_documents_are_read_by_number(root):
    documents = TokenDocuments(root)
    assert len(documents) == len(DOCUMENTS)
    assert [documents.read(index).tolist() for index in range(len(documents))] == DOCUMENTS
    assert documents.lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert documents.lengths.dtype == np.int64
    assert (documents.index.vocab_size, documents.index.end_of_text) == (257, 256)
    assert documents.index.bytes_per_token == pytest.approx((len(STREAM) + 4 - len(DOCUMENTS) - 1) / (len(STREAM) + 4))
    assert TokenDocuments(root, "val").read(0).tolist() == [1, 2, 3, 256]


@pytest.mark.parametrize("kind", [TokenShards, TokenDocuments])
def test_pickling_carries_the_path_alone(root, kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = kind("tokens")
    first = made.read(0) if kind is TokenDocuments else made.windows(np.arange(9), 4)
    pickled = pickle.dumps(made)
    assert len(pickled) < 500
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert np.array_equal(again.read(0) if kind is TokenDocuments else again.windows(np.arange(9), 4), first)


def test_a_split_that_is_not_there_is_named(root):
    with pytest.raises(ConfigError, match=r"no split 'test'\n.*train, val"):
        TokenShards(root, "test")


def damage_index(change):
    def damage(root):
        index = json.loads((root / "index.json").read_text())
        change(index)
        (root / "index.json").write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "index.json").unlink(), r"index.json cannot be read: No such file(.|\n)*prepare tokens"),
        (lambda root: (root / "index.json").write_text("{"), "index.json has unexpected content: JSONDecodeError"),
        (lambda root: (root / "index.json").write_text("[]"), "index.json has unexpected content: TypeError"),
        (
            damage_index(lambda index: index.update(format="ddp_train tokens 2")),
            "the format is 'ddp_train tokens 2'\n.*'ddp_train tokens 1'",
        ),
        (damage_index(lambda index: index.pop("end_of_text")), "index.json has unexpected content: KeyError: 'end_of_text'"),
        (damage_index(lambda index: index.update(dtype="float32")), "index.json has unexpected content: KeyError: 'float32'"),
        (damage_index(lambda index: index.update(vocab_size=70_000)), "tokens do not fit the vocabulary"),
        (damage_index(lambda index: index["splits"]["val"][0].update(file="../a.bin")), "or a shard is empty"),
        (lambda root: (root / "train_00003.bin").unlink(), "train_00003.bin cannot be read: No such file"),
        (lambda root: (root / "train_00000.bin").write_bytes(bytes(121)), "train_00000.bin is truncated: 121 bytes found\n.*122 bytes"),
        (lambda root: (root / "train_00000.bin").write_bytes(bytes(124)), "train_00000.bin is too long: 124 bytes found"),
    ],
)
def test_a_folder_that_is_not_as_it_was_written_is_refused_at_once(root, damage, message):
    damage(root)
    with pytest.raises(DataError, match=message) as caught:
        TokenShards(root)
    assert caught.value.key == "data.root"
    assert caught.value.fix


def test_a_shard_of_the_right_length_with_foreign_content_is_refused_when_it_is_read(root):
    (root / "train_00000.bin").write_bytes(bytes(122))
    shards = TokenShards(root)
    with pytest.raises(DataError, match=r"train_00000.bin ends with the token 0\n.*256"):
        shards.windows(np.asarray([0]), 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"no array", "is not an array"),
        (np.asarray([0, 41]), r"has int64 \[2\]\n.*int64 \[3\]"),
        (np.asarray([0, 41, 43], np.int32), r"has int32 \[3\]"),
        (np.asarray([0, 61, 43]), "starts.npy "),
        (np.asarray([0, 41, 99]), "starts.npy "),
    ],
)
def test_starts_of_documents_that_cannot_be_are_refused(root, content, message):
    path = root / "train_00000.starts.npy"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(DataError, match=message):
        TokenDocuments(root).lengths  # noqa: B018
