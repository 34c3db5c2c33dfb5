import time

import numpy as np
import pytest
import torch
import torch._dynamo  # sets an environment variable when first imported (by optimizers): here, before the guard of conftest looks
from torch import nn

from ddp_train.config.targets.target import check_target
from ddp_train.data.synthetic_images import SyntheticImages
from ddp_train.errors import ConfigErrors
from ddp_train.interfaces import DataSource
from tests.unit.parts import checked


def test_it_is_a_data_source_with_facts():
    data = SyntheticImages(7, image_size=20, channels=2, num_classes=5)
    assert isinstance(data, DataSource)
    assert len(data) == 7
    assert data.facts == {"image_shape": (2, 20, 20), "num_classes": 5}
    images, labels = data.batch(np.asarray([6, 0]))
    assert images.shape == (2, 2, 20, 20)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert labels.tolist() == [1, 0]
    assert labels.dtype == torch.int64


def test_an_image_is_the_same_in_every_batch_and_every_instance():
    whole, _ = SyntheticImages(300).batch(np.arange(300))
    order = np.random.default_rng(0).permutation(300)
    assert torch.equal(SyntheticImages(10**9).batch(order)[0], whole[torch.from_numpy(order)])
    single = torch.cat([SyntheticImages(300).batch(np.asarray([index]))[0] for index in range(30)])
    assert torch.equal(single, whole[:30])


def test_the_images_are_pinned():
    # Whoever changes them changes every recorded result: do it on purpose.
    images, _ = SyntheticImages(10**6).batch(np.asarray([0, 1, 999_999]))
    np.testing.assert_allclose(images[:, 0, 0, 0].numpy(), [-1.278375, 1.127305, 0.995077], atol=1e-5)


def test_a_trillion_samples_cost_nothing():
    started = time.perf_counter()
    data = SyntheticImages(10**12)
    images, labels = data.batch(np.asarray([10**12 - 1]))
    assert time.perf_counter() - started < 1
    assert len(data) == 10**12
    assert labels.tolist() == [9]
    assert images.isfinite().all()


def test_seeds_and_splits_share_no_image():
    sources = [SyntheticImages(500), SyntheticImages(500, "eval"), SyntheticImages(500, seed=1), SyntheticImages(500, "eval", seed=1)]
    images = torch.cat([source.batch(np.arange(500))[0] for source in sources]).flatten(1)
    assert len(torch.unique(images, dim=0)) == 2000


def test_images_are_about_standardised_and_classes_balanced():
    images, labels = SyntheticImages(4000).batch(np.arange(4000))
    assert abs(images.mean()) < 0.01
    assert 0.9 < images.std() < 1.1
    assert labels.bincount().tolist() == [400] * 10


@pytest.mark.long
def test_a_convnet_learns_the_classes_but_not_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, held_out = SyntheticImages(8192), SyntheticImages(1000, "eval").batch(np.arange(1000))
    order = np.random.default_rng(0).permutation(8192 * 3) % 8192
    accuracy = {}
    for step in range(1, 301):
        images, labels = train.batch(order[(step - 1) * 64 : step * 64])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if step in (20, 300):
            with torch.no_grad():
                accuracy[step] = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    assert accuracy[20] < 0.4
    assert accuracy[300] > 0.95


def test_a_linear_model_does_not_learn_the_classes():
    train, held_out = SyntheticImages(8000), SyntheticImages(1000, "eval")
    images, labels = train.batch(np.arange(8000))
    weights = torch.linalg.lstsq(images.flatten(1), nn.functional.one_hot(labels, 10).float()).solution
    images, labels = held_out.batch(np.arange(1000))
    assert ((images.flatten(1) @ weights).argmax(1) == labels).float().mean() < 0.3


@pytest.mark.parametrize("changes", [{"num_samples": 0}, {"num_classes": 0}, {"noise": -0.1}])
def test_a_senseless_argument_is_named(changes):
    (problem,) = check_target({"_target_": "ddp_train.data.synthetic_images.SyntheticImages", "num_samples": 10, **changes}, "data")
    assert problem.key == f"data.{next(iter(changes))}"


@pytest.mark.parametrize("name", ["data.split", "data.eval.split"])
@pytest.mark.parametrize("data", ["synthetic_images", "mnist", "cifar10", "char_text"])
def test_a_split_that_there_is_not_is_refused_by_its_type_before_the_start(data, name):
    with pytest.raises(ConfigErrors, match=rf"{name}: is 'validation'|{name}: .*validation"):
        checked(f"{name}=validation", base=[f"data={data}", "model=mlp"])
