import numpy as np
import pytest

from ddp_train.data.images.augment import random_crop, random_flip, random_integers


def keys_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_every_crop_is_a_window_of_the_padded_image(dtype):
    images = np.random.default_rng(0).integers(1, 255, (50, 3, 6, 5)).astype(dtype)
    cropped = random_crop(images, keys_of(50), padding=2, fill=[0, 7, 9])
    assert cropped.dtype == dtype
    assert cropped.shape == images.shape
    for image, crop in zip(images, cropped, strict=True):
        padded = np.stack([np.pad(image[c], 2, constant_values=fill) for c, fill in enumerate([0, 7, 9])])
        windows = [padded[:, top : top + 6, left : left + 5] for top in range(5) for left in range(5)]
        assert any(np.array_equal(crop, window) for window in windows)


def test_a_crop_without_a_fill_shows_the_image_mirrored_at_its_border():
    images = np.random.default_rng(0).random((50, 3, 6, 5), np.float32)
    cropped = random_crop(images, keys_of(50), padding=2, fill=None)
    black = random_crop(images, keys_of(50), padding=2, fill=[0, 0, 0])
    assert np.array_equal(cropped[black != 0], black[black != 0])  # the same windows
    rows = [abs(row) if row < 6 else 10 - row for row in range(-2, 8)]
    columns = [abs(column) if column < 5 else 8 - column for column in range(-2, 7)]
    for image, crop in zip(images, cropped, strict=True):
        padded = image[:, rows][:, :, columns]
        assert any(np.array_equal(crop, padded[:, top : top + 6, left : left + 5]) for top in range(5) for left in range(5))


def test_crops_reach_every_offset_about_equally_often():
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    cropped = random_crop(np.repeat(image, 9000, axis=0), keys_of(9000), padding=1, fill=[0])
    _, counts = np.unique(cropped.reshape(9000, 9), axis=0, return_counts=True)
    assert len(counts) == 9
    assert counts.min() > 850
    assert counts.max() < 1150


def test_a_flip_mirrors_half_of_the_images():
    images = np.random.default_rng(0).random((2000, 1, 2, 3), np.float32)
    flipped = random_flip(images, keys_of(2000))
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
        return random_flip(random_crop(images[part], keys[part], padding=3, fill=[0, 0, 0]), keys[part])

    whole = augment(np.arange(32))
    order = np.random.default_rng(1).permutation(32)
    assert np.array_equal(augment(order), whole[order])
    assert np.array_equal(np.concatenate([augment([i]) for i in range(32)]), whole)


def test_the_input_is_left_as_it_was():
    images = np.random.default_rng(0).random((8, 1, 4, 4), np.float32)
    before = images.copy()
    random_flip(random_crop(images, keys_of(8), padding=1, fill=[0]), keys_of(8))
    random_flip(images, keys_of(8))
    assert np.array_equal(images, before)


def test_an_empty_batch_stays_empty():
    images = np.empty((0, 3, 4, 4), np.float32)
    assert random_flip(random_crop(images, keys_of(0), padding=1, fill=[0, 0, 0]), keys_of(0)).shape == (0, 3, 4, 4)


def test_neighbouring_keys_give_unrelated_integers():
    counts = np.bincount(random_integers(np.arange(10_000, dtype=np.uint64), 0, below=10), minlength=10)
    assert counts.min() > 880
    assert counts.max() < 1120
