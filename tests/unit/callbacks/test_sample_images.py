"""The pictures that are shown."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.callbacks.sample_images import SampleImages, grid
from tests.unit.callbacks.fake_run import FakeRun


def test_images_stand_side_by_side_each_with_its_own_brightness() -> None:
    sheet = grid(torch.stack([torch.arange(4.0).reshape(1, 2, 2), 10 * torch.arange(4.0).reshape(1, 2, 2), torch.ones(1, 2, 2)]))
    assert sheet.shape == (1, 4, 4)
    torch.testing.assert_close(sheet[0, :2], torch.tensor([[0, 1, 0, 1], [2, 3, 2, 3]]) / 3)
    assert sheet[0, 2:].abs().sum() == 0


def test_a_classifier_shows_what_it_predicts_and_an_image_model_its_images() -> None:
    images, targets = torch.rand(5, 3, 4, 4), torch.tensor([1, 0, 1, 0, 1])
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    run, callback = FakeRun(model=classifier, batch=(images, targets)), SampleImages(count=4)
    streams = torch.get_rng_state()
    callback.on_evaluation(run, {})
    assert run.logged["samples/inputs"].shape == (3, 8, 8)
    assert run.logged["samples/predictions"].count("\n") == 5  # a head of two lines, and four images
    assert torch.equal(torch.get_rng_state(), streams)
    run = FakeRun(model=nn.Dropout(0.5), batch=(images, images))
    SampleImages().on_evaluation(run, {})
    assert run.logged["samples/outputs"].shape == (3, 8, 12)
    assert torch.equal(torch.get_rng_state(), streams)
    other = FakeRun(rank=1, batch=(images, targets))
    SampleImages().on_evaluation(other, {})
    assert other.logged == {}


def test_data_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        SampleImages().on_evaluation(FakeRun(batch=(torch.zeros(2, 3), torch.zeros(2))), {})
