"""What is told of batches of any form."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.data.image_folder import ImageFolder
from ddp_train.data.images.image_array import ImageArray
from ddp_train.hashing import mix
from ddp_train.interfaces.batch import Pixels, as_pair, batch_size, given_batch_size, normalise_and_mix, tensors_of
from ddp_train.loader.blend import Blend
from ddp_train.loader.device_copy import to_device
from ddp_train.loader.worker_pool import SharedBatch


def test_batch_size_is_the_first_dimension_of_the_first_tensor() -> None:
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size(([], (torch.tensor(1.0), torch.zeros(4)))) == 4
    assert batch_size(({"temperature": torch.tensor(1.0), "image": [torch.zeros(5, 1)]}, torch.zeros(7))) == 5
    with pytest.raises(TypeError, match="found none in a dict"):
        batch_size({"name": "cat"})


def test_a_number_that_the_loader_gives_holds_for_its_batch_alone() -> None:
    points = torch.zeros(11, 3)
    with suppress(ZeroDivisionError), given_batch_size(4):
        assert batch_size(points) == batch_size([points]) == 4
        with given_batch_size(None):
            assert batch_size(points) == 11
        assert batch_size(points) == 4
        raise ZeroDivisionError
    assert batch_size(points) == 11


KEYS = mix(np.arange(8, dtype=np.uint64))


def images(**changes: Any) -> ImageArray:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 9, 7), dtype=np.uint8)
    settings: dict[str, Any] = {"num_classes": 4, "mean": (0.49, 0.48, 0.45), "std": (0.25, 0.24, 0.26), "crop_padding": 2, "flip": True}
    return ImageArray(pixels, np.arange(20) % 4, **(settings | changes))


def both(**changes: Any) -> tuple[Any, Any]:
    """Return an augmented batch as a host normalises it, and as it travels."""
    here, there = images(**changes), images(**changes)
    there.give_pixels()
    indices = np.arange(3, 11)
    return here.augment(here.batch(indices), KEYS, indices), there.augment(there.batch(indices), KEYS, indices)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(tensors_of(one), tensors_of(other), strict=True))


def test_a_batch_is_a_quarter_on_its_way_and_the_same_where_it_arrives() -> None:
    here, travelling = both()
    assert isinstance(travelling, Pixels)
    assert 4 * travelling.images.nbytes == here[0].nbytes
    assert batch_size(travelling) == 8
    arrived = to_device(travelling, torch.device("cpu"))
    assert arrived[0].dtype == torch.float32
    assert same(arrived, here)
    assert [each.shape for each in tensors_of(as_pair(travelling))] == [each.shape for each in here]
    assert normalise_and_mix(here) is here


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, None), (None, 1.0), (0.4, 1.0)])
def test_mixed_images_travel_as_bytes_too(mixup: float | None, cutmix: float | None) -> None:
    here, travelling = both()
    others_here, others = both(crop_padding=0)
    blend = Blend(num_classes=4, mixup_alpha=mixup, cutmix_alpha=cutmix)
    mixed, coming = blend(here, others_here, KEYS), blend(travelling, others, KEYS)
    assert isinstance(coming, Pixels)
    assert sum(each.nbytes for each in tensors_of(coming)) < 0.6 * mixed[0].nbytes
    assert same(normalise_and_mix(coming), mixed)


def test_a_worker_hands_it_over() -> None:
    _, travelling = both()
    slot = SharedBatch()
    try:
        taken = slot.copy_out(slot.put(travelling), pin_memory=False)
    finally:
        slot.close()
    assert isinstance(taken, Pixels)
    assert same(normalise_and_mix(taken), normalise_and_mix(travelling))


def test_images_without_labels_are_alone(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for number in range(2):
        pillow.fromarray(np.full((4, 4, 3), 40 * number, np.uint8)).save(tmp_path / f"{number}.png")
    here, there = (ImageFolder(str(tmp_path), "", labelled=False, flip=True) for _ in range(2))
    there.give_pixels()
    indices = np.arange(2)
    found = there.augment(there.batch(indices), KEYS[:2], indices)
    assert isinstance(found, Pixels)
    assert torch.equal(normalise_and_mix(found), here.augment(here.batch(indices), KEYS[:2], indices))
