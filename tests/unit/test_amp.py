"""Mixed precision on a CPU: the same code as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.amp import Amp
from ddp_train.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "computed_in"), [(None, torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_autocast_computes_in_the_type_that_was_asked_for(dtype: str | None, computed_in: torch.dtype) -> None:
    with Amp(dtype).autocast(CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == computed_in


def test_autocast_that_is_off_is_one_object_that_can_be_nested() -> None:
    amp = Amp()
    assert amp.autocast(CPU) is amp.autocast(CPU)
    with amp.autocast(CPU), amp.autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")


def test_only_float16_scales_the_loss() -> None:
    assert [Amp(dtype).scaler(CPU).is_enabled() for dtype in (None, "bfloat16", "float16")] == [False, False, True]


def test_a_disabled_scaler_passes_through() -> None:
    scaler = Amp("bfloat16").scaler(CPU)
    loss = torch.tensor(3.0)
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}


def test_float16_gradients_are_unscaled_before_they_are_clipped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = 0.1 * torch.randn(8, 4)  # the initial scale is 65,536: larger gradients would overflow, and the step be skipped
    model(inputs).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.zero_grad()

    amp = Amp("float16")
    scaler = amp.scaler(CPU)
    with amp.autocast(CPU):
        loss = model(inputs).float().square().mean()
    scaler.scale(loss).backward()
    before = model.weight.detach().clone()
    scaler.unscale_(optimizer)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=2e-2, atol=2e-3)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not model.weight.equal(before)
    assert set(scaler.state_dict()) >= {"scale", "_growth_tracker"}


def test_an_unknown_type_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"amp\.dtype: 'fp8' is no type for mixed precision"):
        Amp("fp8")
