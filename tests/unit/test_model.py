"""Models: shapes, initialisation and the properties that training relies on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.model.convnet import ConvNet
from ddp_train.model.gpt import GPT
from ddp_train.model.mini_resnet import MiniResNet
from ddp_train.model.mlp import MLP


def small_gpt(**kwargs: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**({"vocab_size": 97, "context_length": 16, "num_layers": 2, "num_heads": 4, "width": 64} | kwargs))


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


def test_mlp_has_as_many_hidden_layers_as_asked_for() -> None:
    assert len(MLP((1, 2, 2), 3, depth=5).hidden) == 5
    assert MLP((1, 2, 2), 3, depth=0)(torch.zeros(1, 1, 2, 2)).shape == (1, 3)


@pytest.mark.parametrize("model_class", [MLP, ConvNet])
def test_a_sample_is_computed_alone_so_that_the_split_into_batches_does_not_matter(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class((1, 12, 12), 5).double()
    images_BCHW = torch.randn(6, 1, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([model(images_BCHW[:1]), model(images_BCHW[1:])]), model(images_BCHW), rtol=1e-12, atol=1e-12)


def test_convnet_drops_units_only_in_training() -> None:
    torch.manual_seed(0)
    model = ConvNet((1, 8, 8), 5, dropout=0.5)
    images_BCHW = torch.randn(2, 1, 8, 8)
    assert not model(images_BCHW).equal(model(images_BCHW))
    model.eval()
    assert model(images_BCHW).equal(model(images_BCHW))


def test_mini_resnet_blocks_start_as_the_identity() -> None:
    torch.manual_seed(0)
    model = MiniResNet((3, 16, 16), 10, width=8)
    features_BCHW = torch.randn(4, 8, 16, 16).relu()
    torch.testing.assert_close(model.blocks[0](features_BCHW), features_BCHW)


def test_mini_resnet_has_the_parameters_that_its_config_says() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in MiniResNet((3, 32, 32), 10, blocks_per_stage=blocks).parameters()) for blocks in (2, 3)]
    assert [round(size / 1e6, 1) for size in sizes] == [2.8, 4.3]


def test_gpt2_small_has_124_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT(50257, 1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808  # as in the released weights


def test_gpt_head_and_token_embedding_are_one_parameter() -> None:
    model = small_gpt()
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())  # named_parameters gives each parameter once
    model.load_state_dict(small_gpt().state_dict())
    assert model.head.weight is model.token_embedding.weight


def test_gpt_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = small_gpt(vocab_size=1000)
    tokens_BT = torch.randint(1000, (8, 16))
    targets_BT = torch.randint(1000, (8, 16))
    loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten()).item()
    assert loss == pytest.approx(math.log(1000), abs=0.1)


def test_gpt_residual_projections_start_smaller_and_biases_at_zero() -> None:
    model = small_gpt(num_layers=8, width=256)
    projections = [parameter for name, parameter in model.named_parameters() if name.endswith("project.weight")]
    assert len(projections) == 2 * 8
    for projection in projections:
        assert projection.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_gpt_is_causal() -> None:
    model = small_gpt()
    tokens_BT = torch.randint(97, (2, 16))
    changed_BT = tokens_BT.clone()
    changed_BT[:, 9] = (changed_BT[:, 9] + 1) % 97
    before, after = model(tokens_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-6  # every later position sees the change


def test_gpt_learns_to_repeat() -> None:
    model = small_gpt(vocab_size=11)
    tokens_BT = torch.arange(16).remainder(11).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = F.cross_entropy(model(tokens_BT)[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_gpt_without_bias_has_none() -> None:
    assert not any("bias" in name for name, _ in small_gpt(bias=False).named_parameters())


def test_gpt_dropout_is_off_in_evaluation() -> None:
    model = small_gpt(dropout=0.5)
    tokens_BT = torch.randint(97, (2, 16))
    assert not model(tokens_BT).equal(model(tokens_BT))
    model.eval()
    assert model(tokens_BT).equal(model(tokens_BT))


def test_gpt_takes_short_sequences_and_refuses_long_ones() -> None:
    model = small_gpt()
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 97)
    with pytest.raises(ValueError, match=r"17 tokens does not fit the context of 16.*model\.context_length=17"):
        model(torch.zeros(2, 17, dtype=torch.int64))


def test_gpt_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"model.num_heads: 5 heads do not divide the width 64\n.*\n.*model.width=65"):
        small_gpt(num_heads=5)
