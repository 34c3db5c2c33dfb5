"""The network of airbench94: what it begins with, and what of it is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddp_train.data.images.image_array import ImageArray
from ddp_train.errors import ConfigError
from ddp_train.interfaces import StartingFromData
from ddp_train.model.airbench import Airbench
from tests.unit.data_files import random_images
from tests.unit.parts import components


def images(count: int = 40) -> ImageArray:
    """Return images whose neighbouring pixels are alike."""
    smooth = np.repeat(np.repeat(random_images(count, 3, 4), 4, axis=2), 4, axis=3)
    return ImageArray(smooth, np.arange(count) % 10, num_classes=10, mean=[0.5] * 3, std=[0.25] * 3)


def test_it_has_the_published_size_and_trains_all_but_the_first_kernels_and_the_scales_of_its_norms() -> None:
    with torch.device("meta"):
        model = Airbench((3, 32, 32), 10)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 1.97
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"whitening.weight", *(f"groups.{group}.norm{norm}.weight" for group in range(3) for norm in (1, 2))}
    assert not any(name.endswith("bias") and "norm" not in name and name != "whitening.bias" for name, _ in model.named_parameters())


def test_the_first_layer_gives_values_of_variance_1_that_have_nothing_to_do_with_each_other() -> None:
    model, data = Airbench((3, 16, 16), 10, width=4), images()
    assert isinstance(model, StartingFromData)
    model.start_from(data)
    pixels, _ = data.batch(np.arange(40))
    rows = model.whitening(pixels).detach().transpose(0, 1).flatten(1)
    covariance = rows @ rows.T / rows.shape[1]
    torch.testing.assert_close(covariance[:12, :12], torch.eye(12), atol=0.05, rtol=0)
    assert torch.equal(model.whitening.weight[12:], -model.whitening.weight[:12])


def test_only_the_first_so_many_images_decide_and_they_are_read_as_they_are() -> None:
    few, all_of_them = (Airbench((3, 16, 16), 10, width=4, whitening_samples=number) for number in (16, 1000))
    few.start_from(images())
    all_of_them.start_from(images())
    assert not torch.equal(few.whitening.weight, all_of_them.whitening.weight)
    few.start_from(images(16))
    again = Airbench((3, 16, 16), 10, width=4)
    again.start_from(images(16))
    assert torch.equal(few.whitening.weight, again.whitening.weight)


def test_convolutions_begin_as_the_identity_as_far_as_their_channels_go() -> None:
    torch.manual_seed(0)
    group = Airbench((3, 16, 16), 10, width=32).groups[0]
    features = torch.randn(2, 24, 8, 8)
    first = group.conv1(features)
    assert torch.equal(first[:, :24], features)
    assert not torch.equal(first[:, 24:32], features[:, :8])
    assert torch.equal(group.conv2(first), first)


def test_a_run_begins_with_them_and_another_with_the_weights_that_it_loads() -> None:
    small = ["model=airbench", "model.width=4", "model.whitening_samples=64", "trainer.max_steps=1"]
    parts, again = components(*small), components(*small)
    weight = parts.model.get_parameter("whitening.weight")
    assert torch.equal(weight, again.model.get_parameter("whitening.weight"))
    untouched = Airbench((3, 16, 16), 10, width=4)
    assert not torch.allclose(weight, untouched.whitening.weight)
    twin = Airbench((3, 16, 16), 10, width=4, whitening_samples=64)
    twin.start_from(parts.train_loader._read.samples.source)  # type: ignore[attr-defined]
    assert torch.equal(weight, twin.whitening.weight)
    assert F.cosine_similarity(weight[0].flatten(), untouched.whitening.weight[0].flatten(), dim=0).abs() < 0.999


def test_of_a_stream_it_cannot_be_made() -> None:
    stream = ["data=custom", "data._target_=tests.unit.loader.streams.Counting", "+data.length=8", "+data.eval=null"]
    with pytest.raises(ConfigError, match="the data is a stream"):
        components("model=airbench", "model.image_shape=[3,16,16]", "model.num_classes=10", *stream, "trainer.max_steps=1", base=[])


def test_pooling_computes_the_same_where_it_must_be_deterministic() -> None:
    found = []
    for is_deterministic in (False, True):
        torch.manual_seed(0)
        model = Airbench((3, 17, 16), 10, width=4).eval()
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            outputs = model(torch.randn(2, 3, 17, 16))  # odd: what is left over is in no window
            outputs.square().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        found.append([outputs, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert all(torch.equal(plain, other) for plain, other in zip(*found, strict=True))
