"""A GPT: shapes, initialisation and the properties that training relies on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ddp_train.errors import ConfigError
from ddp_train.model.gpt import GPT


def small_gpt(**kwargs: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**({"vocab_size": 97, "context_length": 16, "num_layers": 2, "num_heads": 4, "width": 64} | kwargs))


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


def test_gpt_has_gpt2s_gelu_or_gelu_itself() -> None:
    tokens_BT, hidden = torch.randint(97, (2, 16)), torch.randn(4, 64)
    tanh, exact = small_gpt(), small_gpt(gelu="none")
    assert 0 < (tanh(tokens_BT) - exact(tokens_BT)).abs().max() < 1e-3
    part = exact.blocks[0].mlp
    torch.testing.assert_close(part(hidden), part.project(F.gelu(part.widen(hidden))))


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
