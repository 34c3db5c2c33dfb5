import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from ddp_train.data.dataset import DatasetSource, as_source
from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.interfaces import DataSource


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
