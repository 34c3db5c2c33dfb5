import numpy as np
import pytest
import torch

from ddp_train.data.images.image_array import ImageArray, random_crop, random_flip, random_integers
from ddp_train.errors import ConfigError
from ddp_train.interfaces.batch import normalise_and_mix
from tests.unit.data_files import random_images

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def keys_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


def numpy_crop(images, keys, *, padding, fill):
    filling = None if fill is None else torch.tensor(fill).reshape(-1, 1, 1)
    return random_crop(torch.from_numpy(images), keys, padding=padding, fill_C11=filling).numpy()


def numpy_flip(images, keys):
    return random_flip(torch.from_numpy(images), keys).numpy()


def source(**changes):
    arguments = {"num_classes": 10, "mean": MEAN, "std": STD} | changes
    return ImageArray(random_images(20, 3, 8), np.arange(20, dtype=np.uint8) % 10, **arguments)


def test_facts_tell_the_shape_and_the_classes():
    assert source().facts == {"image_shape": (3, 8, 8), "num_classes": 10}
    assert len(source()) == 20


def test_images_are_normalised_per_channel():
    images, labels = source().batch(np.asarray([3, 11, 3]))
    expected = (random_images(20, 3, 8)[[3, 11, 3]] / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [3, 1, 3]


def test_an_image_is_the_same_in_every_batch():
    whole, _ = source().batch(np.arange(20))
    assert torch.equal(torch.cat([source().batch(np.asarray([i]))[0] for i in range(20)]), whole)


def test_fetching_changes_nothing_in_memory():
    data = source()
    first = data.batch(np.arange(20))[0].clone()
    data.batch(np.arange(20))[0].zero_()
    assert torch.equal(data.batch(np.arange(20))[0], first)


def test_padding_is_black_after_normalisation():
    data = ImageArray(np.full((40, 3, 4, 4), 255, np.uint8), np.zeros(40, np.uint8), num_classes=1, mean=MEAN, std=STD, crop_padding=3)
    images, _ = data.augment(data.batch(np.arange(40)), keys_of(40), np.arange(40))
    for channel in range(3):
        found = np.unique(images[:, channel].numpy())
        np.testing.assert_allclose(found, [-MEAN[channel] / STD[channel], (1 - MEAN[channel]) / STD[channel]], rtol=1e-5)


def test_augmenting_a_normalised_batch_equals_normalising_an_augmented_one():
    data = source(crop_padding=2, flip=True)
    plain = ImageArray(random_images(20, 3, 8), np.arange(20), num_classes=20, mean=[0] * 3, std=[1 / 255] * 3, crop_padding=2, flip=True)
    images, _ = data.augment(data.batch(np.arange(20)), keys_of(20), np.arange(20))
    pixels, _ = plain.augment(plain.batch(np.arange(20)), keys_of(20), np.arange(20))
    expected = (pixels.double() / 255 - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1)
    torch.testing.assert_close(images.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", [{"flip": True}, {"crop_fill": "reflect"}])
def test_on_a_device_the_batches_are_the_same(changes, monkeypatch):
    here, there = source(crop_padding=2, **changes), source(crop_padding=2, **changes)
    there.to(torch.device("cpu"))
    indices = np.asarray([3, 1, 1, 19, 0])
    expected = here.augment(here.batch(indices), keys_of(5), indices)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # the operations are those of a GPU
    found = there.augment(there.batch(indices), keys_of(5), indices)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_without_crop_and_flip_a_batch_is_left_alone():
    batch = source().batch(np.arange(4))
    assert torch.equal(source().augment(batch, keys_of(4), np.arange(4))[0], batch[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"mean": [0.5]},
        {"std": [1.0, 0.0, 1.0]},
        {"crop_padding": 8, "crop_fill": "reflect"},
    ],
)
def test_a_senseless_argument_is_named(changes):
    with pytest.raises(ConfigError, match=f"data.{next(iter(changes))}"):
        source(**changes)


def test_images_tell_their_labels() -> None:
    source = ImageArray(np.zeros((3, 1, 2, 2), np.uint8), np.asarray([2, 0, 2], np.uint8), num_classes=3, mean=[0.0], std=[1.0])
    assert source.labels.tolist() == [2, 0, 2]


def test_of_bytes_the_same_is_mirrored_at_the_border_and_flipped() -> None:
    here, there = (source(crop_padding=2, crop_fill="reflect", flip=True) for _ in range(2))
    there.give_pixels()
    indices = np.asarray([3, 1, 1, 19, 0])
    found = [each.augment(each.batch(indices), keys_of(5), indices) for each in (here, there)]
    assert torch.equal(normalise_and_mix(found[1])[0], found[0][0])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_every_crop_is_a_window_of_the_padded_image(dtype):
    images = np.random.default_rng(0).integers(1, 255, (50, 3, 6, 5)).astype(dtype)
    cropped = numpy_crop(images, keys_of(50), padding=2, fill=[0, 7, 9])
    assert cropped.dtype == dtype
    assert cropped.shape == images.shape
    for image, crop in zip(images, cropped, strict=True):
        padded = np.stack([np.pad(image[c], 2, constant_values=fill) for c, fill in enumerate([0, 7, 9])])
        windows = [padded[:, top : top + 6, left : left + 5] for top in range(5) for left in range(5)]
        assert any(np.array_equal(crop, window) for window in windows)


def test_a_crop_without_a_fill_shows_the_image_mirrored_at_its_border():
    images = np.random.default_rng(0).random((50, 3, 6, 5), np.float32)
    cropped = numpy_crop(images, keys_of(50), padding=2, fill=None)
    black = numpy_crop(images, keys_of(50), padding=2, fill=[0, 0, 0])
    assert np.array_equal(cropped[black != 0], black[black != 0])  # the same windows
    rows = [abs(row) if row < 6 else 10 - row for row in range(-2, 8)]
    columns = [abs(column) if column < 5 else 8 - column for column in range(-2, 7)]
    for image, crop in zip(images, cropped, strict=True):
        padded = image[:, rows][:, :, columns]
        assert any(np.array_equal(crop, padded[:, top : top + 6, left : left + 5]) for top in range(5) for left in range(5))


def test_crops_reach_every_offset_about_equally_often():
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    cropped = numpy_crop(np.repeat(image, 9000, axis=0), keys_of(9000), padding=1, fill=[0])
    _, counts = np.unique(cropped.reshape(9000, 9), axis=0, return_counts=True)
    assert len(counts) == 9
    assert counts.min() > 850
    assert counts.max() < 1150


def test_a_flip_mirrors_half_of_the_images():
    images = np.random.default_rng(0).random((2000, 1, 2, 3), np.float32)
    flipped = numpy_flip(images, keys_of(2000))
    is_mirrored = (flipped == images[..., ::-1]).all(axis=(1, 2, 3))
    is_same = (flipped == images).all(axis=(1, 2, 3))
    assert (is_mirrored ^ is_same).all()
    assert 900 < is_mirrored.sum() < 1100


def test_a_flip_and_a_crop_are_independent():
    keys = keys_of(4000)
    counts = np.zeros((2, 3), int)
    np.add.at(counts, (random_integers(keys, 2, below=2), random_integers(keys, 0, below=3)), 1)
    assert counts.min() > 560
    assert counts.max() < 780


def test_the_result_of_a_sample_does_not_depend_on_its_batch():
    images = np.random.default_rng(0).random((32, 3, 8, 8), np.float32)
    keys = keys_of(32)

    def augment(part):
        return numpy_flip(numpy_crop(images[part], keys[part], padding=3, fill=[0, 0, 0]), keys[part])

    whole = augment(np.arange(32))
    order = np.random.default_rng(1).permutation(32)
    assert np.array_equal(augment(order), whole[order])
    assert np.array_equal(np.concatenate([augment([i]) for i in range(32)]), whole)


def test_the_input_is_left_as_it_was():
    images = np.random.default_rng(0).random((8, 1, 4, 4), np.float32)
    before = images.copy()
    numpy_flip(numpy_crop(images, keys_of(8), padding=1, fill=[0]), keys_of(8))
    numpy_flip(images, keys_of(8))
    assert np.array_equal(images, before)


def test_an_empty_batch_stays_empty():
    images = np.empty((0, 3, 4, 4), np.float32)
    assert numpy_flip(numpy_crop(images, keys_of(0), padding=1, fill=[0, 0, 0]), keys_of(0)).shape == (0, 3, 4, 4)


def test_neighbouring_keys_give_unrelated_integers():
    counts = np.bincount(random_integers(np.arange(10_000, dtype=np.uint64), 0, below=10), minlength=10)
    assert counts.min() > 880
    assert counts.max() < 1120
