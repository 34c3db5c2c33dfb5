"""What all models of images have in common."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_train.model.convnet import ConvNet
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.model.mlp import MLP


@pytest.mark.parametrize("image_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 9, 13)])
@pytest.mark.parametrize("model_class", [MLP, ConvNet, MiniResNet])
def test_image_models_give_one_logit_per_class_and_a_gradient_for_every_parameter(
    model_class: type[nn.Module], image_shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    model = model_class(image_shape, 7, width=8)
    logits_BK = model(torch.randn(3, *image_shape))
    assert logits_BK.shape == (3, 7)
    F.cross_entropy(logits_BK, torch.tensor([0, 3, 6])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("model_class", [MLP, ConvNet])
def test_a_sample_is_computed_alone_so_that_the_split_into_batches_does_not_matter(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class((1, 12, 12), 5).double()
    images_BCHW = torch.randn(6, 1, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([model(images_BCHW[:1]), model(images_BCHW[1:])]), model(images_BCHW), rtol=1e-12, atol=1e-12)
