from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import DataSource
from ddp_train.loader import dataset_adapter as module
from ddp_train.loader.dataset_adapter import DatasetSource, as_source, collate, keys_without_epochs
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.mixture import MixtureSource
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.reader import TrainReader, TrainRequest
from ddp_train.loader.sampler import Shuffled
from ddp_train.training.seeding import seed_all
from tests.unit.parts import components


class Squares(Dataset):
    classes = ("even", "odd")

    def __len__(self):
        return 10

    def __getitem__(self, index):
        assert type(index) is int  # as torch's own loader passes them
        return {"x": torch.tensor([float(index**2)]), "y": index % 2}


class BatchedSquares(Squares):
    facts = {"image_shape": (1, 1, 1), "num_classes": 7}  # noqa: RUF012

    def __getitems__(self, indices):
        return [{"x": torch.tensor([-1.0]), "y": index} for index in indices]


def test_a_map_style_dataset_becomes_a_data_source():
    source = as_source(Squares())
    assert isinstance(source, DataSource)
    assert len(source) == 10
    batch = source.batch(np.asarray([3, 1, 3]))
    assert batch["x"].tolist() == [[9.0], [1.0], [9.0]]
    assert batch["y"].tolist() == [1, 1, 1]
    assert source.facts == {"num_classes": 2}


@pytest.mark.parametrize("name", ["facts", "classes", "fingerprint", "meaning", "labels", "lengths", "features"])
def test_an_error_in_a_datasets_own_member_is_not_taken_for_a_missing_one(name):
    dataset = type("Broken", (Squares,), {name: property(lambda self: self.no_such_file)})()

    def read_all():
        source = as_source(dataset)
        return source.facts, source.fingerprint, source.meaning, source.labels, source.lengths

    with pytest.raises(AttributeError, match="no_such_file"):
        read_all()


def test_a_dataset_that_fetches_batches_is_asked_for_batches():
    assert as_source(BatchedSquares()).batch(np.asarray([4, 2]))["x"].tolist() == [[-1.0], [-1.0]]


def test_its_own_facts_come_first():
    assert as_source(BatchedSquares()).facts == {"image_shape": (1, 1, 1), "num_classes": 7}


def test_tuples_are_collated_as_tuples():
    images, labels = as_source(TensorDataset(torch.ones(4, 2), torch.arange(4))).batch(np.asarray([2, 0]))
    assert images.shape == (2, 2)
    assert labels.tolist() == [2, 0]


def test_a_data_source_stays_what_it_is():
    source = SyntheticImages(10)
    assert as_source(source) is source


class Own:
    """A data source as somebody writes one who has never seen the base class."""

    facts = {"num_classes": 2}  # noqa: RUF012
    classes = ("even", "odd")
    labels = np.arange(6) % 2

    def __len__(self):
        return 6

    def batch(self, indices):
        return torch.from_numpy(indices)

    def augment(self, batch, keys, indices):
        return batch + 1


def test_a_data_source_of_another_class_has_our_defaults_for_what_it_lacks():
    source = pickle.loads(pickle.dumps(as_source(Own())))
    assert isinstance(source, DataSource) and len(source) == 6 and source.facts == {"num_classes": 2}
    indices, keys = np.asarray([4, 2]), np.zeros(2, np.uint64)
    assert source.augments and source.augment(source.batch(indices), keys, indices).tolist() == [5, 3]
    assert (source.meaning, source.fingerprint, source.where(0), source.lengths) == ({"classes": ["even", "odd"]}, {}, "", None)
    assert source.labels is Own.labels and source.classes == Own.classes
    with pytest.raises(ConfigError, match="cannot live on the device"):
        source.to(torch.device("cpu"))


class Part:
    """Another data source's samples from one on, as somebody writes it who has never seen our base class."""

    facts = {}  # noqa: RUF012
    augments = True

    def __init__(self, dataset, first):
        self._whole, self._first = as_source(dataset), first
        self.augmented = []

    def __len__(self):
        return len(self._whole) - self._first

    def batch(self, indices):
        return self._whole.batch(indices + self._first)

    def seed_reads(self, keys_of):
        self._whole.seed_reads(lambda indices: keys_of(indices - self._first))

    def augment(self, batch, keys, indices):
        self.augmented += zip(batch[0].tolist(), keys.tolist(), indices.tolist(), strict=True)
        return batch


def test_a_source_around_another_one_gets_its_seeds_and_indices():
    part = Part(Jittered(), 6)
    order = SampleOrder(Shuffled(4, seed=3), global_batch_size=4, drop_last=False)
    read = TrainReader(as_source(part), order, skips_bad_samples=False)
    torch.manual_seed(0)
    first, again, other = ([column.tolist() for column in read(TrainRequest(epoch, 0, 4)).batch] for epoch in (0, 0, 1))
    assert first == again and not set(first[3]) & set(other[3])
    indices = order.indices(0, 0, 4)
    assert part.augmented[:4] == [*zip((indices + 6).tolist(), order.sample_keys(0, indices).tolist(), indices.tolist(), strict=True)]
    mixture = MixtureSource({"a": as_source(Jittered()), "b": as_source(Part(Jittered(), 6))}, {"a": 1.0, "b": 1.0})
    mixture.seed_reads(lambda indices: indices.astype(np.uint64))
    drawn = mixture.batch(np.asarray([11]))[1].item()
    random.seed(11)
    assert drawn == random.random()


def test_a_data_source_without_batch_is_refused_by_that_name():
    class Unfinished(DataSource):
        facts = {}  # noqa: RUF012
        __len__ = Own.__len__

    with pytest.raises(TypeError, match=r"Unfinished.*\bbatch\b"):
        Unfinished()


class Jittered(Squares):
    """A transform that draws from every global generator, as torchvision's and many users' do."""

    def __getitem__(self, index):
        if index == 5:
            return index, 0.0, 0.0, 0.0  # like a transform that is applied now and then
        return index, random.random(), np.random.standard_normal(), torch.rand(1).item()


class JitteredInBatches(Jittered):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def drawn(dataset, *, world_size, num_workers=0, accumulation=1):
    """Return what each sample of two epochs drew."""
    found = {}
    for rank in range(world_size):
        order = SampleOrder(Shuffled(10, seed=3), global_batch_size=4, drop_last=False)
        parts = {"rank": rank, "world_size": world_size, "grad_accum_steps": accumulation, "num_workers": num_workers}
        stream = PositionedTrainLoader(DatasetSource(dataset), order, **parts, pin_memory=False).micro_batches(0)
        for number, micro_batch in enumerate(islice(stream, 6 * accumulation)):
            if not micro_batch.is_stand_in:
                for index, *draws in zip(*(column.tolist() for column in micro_batch.batch), strict=True):
                    found[number // accumulation // 3, index] = draws
        stream.close()
    return found


@pytest.mark.parametrize("kind", [Jittered, JitteredInBatches])
def test_a_transform_draws_the_same_for_a_sample_whatever_the_ranks_and_workers(kind):
    alone = drawn(kind(), world_size=1)
    assert len(alone) == 20
    assert len({value for draws in alone.values() for value in draws}) == 18 * 3 + 1  # other ones for each sample, epoch and generator
    assert drawn(kind(), world_size=1, num_workers=2) == alone
    assert drawn(kind(), world_size=3) == alone
    assert drawn(kind(), world_size=3, accumulation=2) == alone


def test_an_evaluation_draws_the_same_every_time():
    source = as_source(Jittered())
    first, again = (source.batch(np.asarray([1, 2, 3])) for _ in range(2))
    (alone,) = zip(*source.batch(np.asarray([2])), strict=True)
    assert [column.tolist() for column in first] == [column.tolist() for column in again]
    assert [column[1] for column in first] == list(alone)


def test_reading_leaves_the_streams_of_the_process_alone():
    def draws():
        return random.random(), random.gauss(), np.random.standard_normal(), torch.rand(1).item()

    for dataset in (Jittered(), Squares()):
        source, found = as_source(dataset), []
        for reads in (0, 3):
            seed_all(7)
            np.random.standard_normal()  # leaves a second normal number over, which is state too
            for start in range(reads):
                source.batch(np.arange(start, start + 4))
            found.append(draws())
        assert found[0] == found[1]


def test_numpy_and_torch_get_streams_of_their_own():
    """Both are the Mersenne twister: with the same 32 bits they would draw the same."""

    class Words(Squares):
        def __getitem__(self, index):
            return int.from_bytes(np.random.bytes(4), "little") % 2**31, int(torch.randint(2**31, (1,)))

    source = as_source(Words())
    source.seed_reads(lambda indices: indices.astype(np.uint64) * 0x1_0000_0001 + 5)
    numpy, tensor = source.batch(np.arange(10))
    assert not set(numpy.tolist()) & set(tensor.tolist())


def test_a_sample_draws_what_its_key_says():
    """The numbers of a run that goes on from a checkpoint: they may not change with what draws beside."""
    source = as_source(Jittered())
    index, one, other, third = (column[1].item() for column in source.batch(np.asarray([5, 3])))
    key = int(keys_without_epochs(np.asarray([3]))[0])
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key >> 32)
    assert (index, one, other, third) == (3, random.random(), np.random.standard_normal(), torch.rand(1).item())


def test_a_transform_may_seed_a_generator_by_torchs_seed():
    class ByTorchsSeed(Squares):
        def __getitem__(self, index):
            np.random.seed(torch.initial_seed() % 2**32)
            return index, np.random.rand()

    found = []
    for seed in (1, 2):  # two ranks
        torch.manual_seed(seed)
        found.append(as_source(ByTorchsSeed()).batch(np.arange(3))[1].tolist())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_rows_of_tensors_are_had_at_once_and_are_the_same():
    rows = TensorDataset(torch.rand(9, 2, 3), torch.arange(9), torch.rand(9) > 0.5)
    together = as_source(rows).batch(np.asarray([7, 0, 7]))
    one_by_one = default_collate([rows[index] for index in (7, 0, 7)])
    assert type(together) is type(one_by_one)
    for found, expected in zip(together, one_by_one, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    together[0].zero_()
    assert rows[7][0].any()

    class Own(TensorDataset):
        def __getitem__(self, index):
            return index

    assert as_source(Own(torch.rand(9))).batch(np.asarray([7, 0])).tolist() == [7, 0]
    with pytest.raises(ConfigError, match=r"loader\.fields: a sample is a tuple"):
        as_source(rows, ["x"]).batch(np.asarray([0]))


def test_other_things_are_refused_clearly():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError, match=r"dict has several splits \(train, test\): choose one, as data.split=train"):
        as_source({"train": [1], "test": [2]})
    with pytest.raises(TypeError, match=r"Endless has no __len__"):
        as_source(Endless())
    with pytest.raises(TypeError, match=r"set has no __getitem__"):
        DatasetSource({1, 2})


def pad(samples):
    """Pad to the longest, and mark a place at random: 8 lines, as a user's own."""
    longest = max(len(numbers) for numbers, _ in samples)
    inputs = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, (numbers, _) in enumerate(samples):
        inputs[row, : len(numbers)] = torch.tensor(numbers)
    return {"inputs": inputs, "masked": torch.randint(100, (len(samples),))}, torch.tensor([label for _, label in samples])


class Ragged(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return [1] * (1 + index % 5), index % 2


def test_an_own_collate_makes_the_batch_and_what_it_draws_is_its_samples():
    source = as_source(Ragged(), collate_fn=pad)
    before = torch.get_rng_state()
    inputs, labels = source.batch(np.asarray([0, 4, 2]))
    assert inputs["inputs"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert labels.tolist() == [0, 0, 0]
    assert source.batch(np.asarray([0, 4, 2]))[0]["masked"].tolist() == inputs["masked"].tolist()
    assert source.batch(np.asarray([1, 4, 2]))[0]["masked"].tolist() != inputs["masked"].tolist()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match=r"loader\.collate: is given, and SyntheticImages gives whole batches"):
        as_source(SyntheticImages(10), collate_fn=pad)


def test_a_collate_that_draws_is_given_fresh_samples_and_they_are_read_together():
    """It is called again when it is first seen to draw, and may have changed the samples."""
    reads = []

    class Batched(Ragged):
        def __getitems__(self, indices):
            reads.append(len(indices))
            return [{"numbers": self[index][0]} for index in indices]

    def popping(samples):
        return torch.tensor([sum(sample.pop("numbers")) for sample in samples]), torch.rand(1)

    source = as_source(Batched(), collate_fn=popping)
    (numbers, first), (_, again) = (source.batch(np.arange(4)) for _ in range(2))
    assert numbers.tolist() == [1, 2, 3, 4]
    assert first == again
    assert reads == [4, 4, 4]


def test_collate_by_target_is_a_function_or_what_a_class_makes():
    base = ["model=mlp", "model.image_shape=[1,1,5]", "model.num_classes=2", "~metrics.tensorboard", "~data"]
    own = [f"+data._target_={__name__}.Ragged", f"+loader.collate._target_={__name__}.pad"]
    batch, labels = next(components(*own, base=base).train_loader.micro_batches(0)).batch
    assert batch["inputs"].shape == (32, 5)
    assert labels.shape == (32,)


class Point(NamedTuple):
    x: Tensor
    y: int


NUMBERS = [
    int,
    float,
    bool,
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.float16,
    np.float32,
    np.float64,
]
SAMPLES: dict[str, list[Any]] = {
    **{kind.__name__: [kind(value) for value in (1, 0, 3)] for kind in NUMBERS},
    "complex numbers": [np.complex64(1), np.complex64(2j)],
    "tensors": [torch.rand(2, 3), torch.rand(2, 3)],
    "tensors of two types": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "parameters": [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))],
    **{f"arrays of {kind.__name__}": [np.arange(6).reshape(2, 3).astype(kind) for _ in range(2)] for kind in NUMBERS},
    "arrays without dimensions": [np.array(1.5), np.array(2.5)],
    "arrays of two types": [np.ones(2, np.float32), np.ones(2, np.float64)],
    "arrays that are views": [np.arange(12).reshape(3, 4)[:, 1], np.arange(12).reshape(3, 4)[:, 2]],
    "empty arrays": [np.zeros((0, 2)), np.zeros((0, 2))],
    "text": ["one", "two"],
    "bytes": [b"one", b"two"],
    "booleans and numbers": [True, 2],
    "whole and broken numbers": [1, 2.5],
    "broken and whole numbers": [2.5, 1],
    "numbers of two kinds": [1, np.int32(2)],
    "numbers and scalars": [1, torch.tensor(2)],
    "tuples": [(torch.ones(2), 1), (torch.zeros(2), 2)],
    "lists": [[torch.ones(2), 1], [torch.zeros(2), 2]],
    "lists of numbers": [[1, 2, 3], [4, 5, 6]],
    "empty tuples": [(), ()],
    "named tuples": [Point(torch.ones(2), 1), Point(torch.zeros(2), 2)],
    "dicts": [{"a": 1, "b": {"c": [np.ones(2), "x"]}}, {"a": 2, "b": {"c": [np.zeros(2), "y"]}, "more": 1}],
    "a tuple with dicts": [({"a": torch.ones(1)}, (1, 2.0)), ({"a": torch.zeros(1)}, (3, 4.0))],
    "one sample": [(torch.ones(2), 7)],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_batch_is_what_torch_makes_of_it(samples: list[Any]) -> None:
    assert plain(collate(samples, None)) == plain(default_collate(samples))


def plain(value: Any) -> Any:
    """Return what is nested in something, with the types of everything."""
    if isinstance(value, dict):
        return dict, {name: plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [plain(each) for each in value]
    return (type(value), value.dtype, value.is_contiguous(), value.tolist()) if isinstance(value, Tensor) else (type(value), value)


def test_mappings_of_other_kinds_become_dicts() -> None:
    assert type(collate([OrderedDict(a=1), OrderedDict(a=2)], None)) is dict


def test_a_batch_is_nobody_elses_memory() -> None:
    samples = [np.ones(3), np.ones(3)]
    first, second = collate(samples, None), collate(samples, None)
    first += 1
    assert second.tolist() == [[1.0] * 3] * 2
    assert samples[0].tolist() == [1.0] * 3


REFUSED: dict[str, tuple[list[Any], str]] = {
    "tensors": ([torch.ones(3), torch.ones(2)], r"one is float32 \[3\], another float32 \[2\]"),
    "arrays": ([np.ones(3), np.ones(2)], r"one is float64 \[3\], another float64 \[2\]"),
    "in a tuple": ([(torch.ones(3), 1), (torch.ones(2), 1)], r"one is \(float32 \[3\], a int\), another \(float32 \[2\], a int\)"),
    "lengths": ([[1, 2], [1]], r"one is \(a int, a int\), another \(a int\)"),
    "a key": ([{"a": 1, "b": 2}, {"a": 1}], r"one is \{a: a int, b: a int\}, another \{a: a int\}"),
    "types": ([1, "one"], "one is a int, another a str"),
    "none": ([1.0, None], "one is a float, another None"),
}


@pytest.mark.parametrize(("samples", "said"), REFUSED.values(), ids=REFUSED)
def test_samples_that_do_not_go_together_are_told_apart(samples: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"loader.collate: samples of a batch cannot be stacked: {said}\n"):
        collate(samples, None)


def test_what_cannot_be_stacked_at_all_is_said_by_torch() -> None:
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        collate([None, None], None)
    with pytest.raises(RuntimeError, match="sparse tensors are not currently supported"):
        collate([torch.ones(2).to_sparse()], None)
    with pytest.raises(ValueError, match="Overflow"):
        collate([1, 2**63], None)


def test_what_somebody_has_told_torch_to_collate_is_collated_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Words(str):
        pass

    monkeypatch.setitem(default_collate_fn_map, Words, lambda batch, *, collate_fn_map: torch.tensor([len(text) for text in batch]))
    monkeypatch.setitem(default_collate_fn_map, int, lambda batch, *, collate_fn_map: sum(batch))
    lengths, numbers = collate([(Words("one"), 1), (Words("three"), 2)], None)
    assert lengths.tolist() == [3, 5]
    assert numbers == 3


def test_fields_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match=r"loader.fields: a sample has image, label\n.*a dict with image, target"):
        collate([{"image": 1, "label": 2}], ["image", "target"])
    with pytest.raises(ConfigError, match=r"loader.fields: a sample is a int"):
        collate([1], ["image"])
    images, _ = collate([{"label": 1, "image": torch.ones(2)}] * 3, ["image", "label"])
    assert images.shape == (3, 2)


def test_usual_samples_do_not_need_torchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what the quicker ways are for."""

    def never(samples: Any) -> None:
        pytest.fail(f"asked for {samples}")

    never.__module__ = default_collate.__module__
    monkeypatch.setattr(module, "default_collate", never)
    collate([(torch.ones(2), 1, 1.0, np.float32(1), np.ones(2), {"a": [True]})] * 2, None)
