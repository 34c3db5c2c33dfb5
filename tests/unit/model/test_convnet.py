"""A small convolutional net."""

from __future__ import annotations

import torch

from ddp_train.model.convnet import ConvNet


def test_convnet_drops_units_only_in_training() -> None:
    torch.manual_seed(0)
    model = ConvNet((1, 8, 8), 5, dropout=0.5)
    images_BCHW = torch.randn(2, 1, 8, 8)
    assert not model(images_BCHW).equal(model(images_BCHW))
    model.eval()
    assert model(images_BCHW).equal(model(images_BCHW))
