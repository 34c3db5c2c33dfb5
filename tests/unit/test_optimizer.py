"""Parameter groups, and Muon with AdamW behind one interface."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ddp_train.errors import ConfigError
from ddp_train.optimizer import MuonAdamW, muon, parameter_groups


class Tiny(nn.Module):
    """One of each: convolution, embedding, hidden matrix, norm, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 5)  # tied, so it is no hidden matrix, whatever it is called
        self.output.weight = self.embedding.weight

    def forward(self, tokens_B: Tensor) -> Tensor:
        shift = self.conv(torch.ones(1, 1, 3, 3)).sum()
        logits_BV: Tensor = self.output(self.norm(self.hidden(self.embedding(tokens_B)) + shift))
        return logits_BV


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scaler: torch.amp.GradScaler | None = None) -> list[Tensor]:
    """Take steps and return the parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.arange(5)), torch.arange(5).roll(step))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()]


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {of[id(parameter)] for parameter in parameters}


def test_matrices_are_decayed_and_biases_and_norms_are_not() -> None:
    model = tiny()
    decayed, others = parameter_groups(model, 0.1)
    assert names(model, decayed["params"]) == {"conv.weight", "embedding.weight", "hidden.weight"}
    assert names(model, others["params"]) == {"conv.bias", "hidden.bias", "norm.weight", "norm.bias", "output.bias"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = tiny()
    model.hidden.requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(parameter) for name, parameter in model.named_parameters() if not name.startswith("hidden")}


def test_an_optimizer_without_weight_decay_gets_one_group_without_the_argument() -> None:
    (group,) = parameter_groups(tiny(), None)
    assert set(group) == {"params"}
    assert len(group["params"]) == 8


def test_without_decay_all_parameters_share_one_group_and_one_kernel() -> None:
    (group,) = parameter_groups(tiny(), 0.0)
    assert (group["weight_decay"], len(group["params"])) == (0.0, 8)
    assert len(muon(tiny(), adamw_weight_decay=0.0).param_groups) == 2


def test_no_group_is_empty() -> None:
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    with pytest.raises(ConfigError, match="no parameter is to be trained"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


def test_muon_gets_the_hidden_matrices_alone() -> None:
    model = tiny()
    groups = muon(model).param_groups
    assert [names(model, group["params"]) for group in groups] == [
        {"hidden.weight"},
        {"conv.weight", "embedding.weight"},
        {"conv.bias", "hidden.bias", "norm.weight", "norm.bias", "output.bias"},
    ]
    assert [group["lr"] for group in groups] == [0.02, 3e-4, 3e-4]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_muon_leaves_an_untied_head_to_adamw_also_inside_a_wrapper() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"hidden": nn.Linear(3, 3), "head": nn.Linear(3, 2)})})
    assert names(model, muon(model).param_groups[0]["params"]) == {"module.hidden.weight"}


def test_muon_without_a_hidden_matrix_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no hidden weight matrix"):
        muon(nn.Conv2d(1, 2, 3))


def test_muon_steps_as_the_two_torch_optimizers_do_alone() -> None:
    model, twin = tiny(), tiny()
    after = train(model, muon(model, adamw_fused=False), 3)
    hidden = torch.optim.Muon([twin.hidden.weight], lr=0.02, momentum=0.95, weight_decay=0.1)
    rest = [parameter for parameter in twin.parameters() if parameter is not twin.hidden.weight]
    groups = [
        {"params": [parameter for parameter in rest if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=False)
    for step in range(3):
        twin.zero_grad()
        nn.functional.cross_entropy(twin(torch.arange(5)), torch.arange(5).roll(step)).backward()
        hidden.step()
        adamw.step()
    assert all(mine.equal(theirs) for mine, theirs in zip(after, twin.parameters(), strict=True))


def through_a_file(optimizer: MuonAdamW, other: MuonAdamW, models: tuple[nn.Module, nn.Module]) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def through_distributed_checkpoint(optimizer: MuonAdamW, other: MuonAdamW, models: tuple[nn.Module, nn.Module]) -> None:
    state = copy.deepcopy(get_optimizer_state_dict(models[0], optimizer))  # torch loads without copying: both would share their buffers
    set_optimizer_state_dict(models[1], other, state)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("copy_state", [through_a_file, through_distributed_checkpoint])
def test_muon_continues_bitwise_from_its_saved_state(copy_state: Callable[..., None], fused: bool) -> None:
    model = tiny()
    optimizer = muon(model, adamw_fused=fused)
    train(model, optimizer, 3)
    other_model = tiny()
    other_model.load_state_dict(model.state_dict())
    other = muon(other_model, lr=1.0, adamw_lr=1.0, adamw_fused=fused)  # the loaded state has the old rates
    copy_state(optimizer, other, (model, other_model))
    assert str(other.state_dict()) == str(optimizer.state_dict())
    for mine, theirs in zip(train(other_model, other, 3), train(model, optimizer, 3), strict=True):
        assert mine.equal(theirs)


def test_muon_survives_a_copy() -> None:
    model = tiny()
    optimizer = muon(model)
    train(model, optimizer, 1)
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    for mine, theirs in zip(train(model2, optimizer2, 2), train(model, optimizer, 2), strict=True):
        assert mine.equal(theirs)


def test_a_schedule_scales_both_parts_of_muon() -> None:
    model = tiny()
    before = train(model, optimizer := muon(model), 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert all(mine.equal(theirs) for mine, theirs in zip(before, train(model, optimizer, 1), strict=True))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    assert not any(mine.equal(theirs) for mine, theirs in zip(before, train(model, optimizer, 1), strict=True))


@pytest.mark.parametrize("make", [muon, lambda model: torch.optim.AdamW(model.parameters(), fused=True)])
def test_a_gradient_scaler_changes_nothing_but_skips_overflows(make: Callable[[nn.Module], Any]) -> None:
    plain, scaled = tiny(), tiny()
    expected = train(plain, make(plain), 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # a power of two: scaling back is exact
    optimizer = make(scaled)
    actual = train(scaled, optimizer, 3, scaler)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    scaler.scale(scaled(torch.arange(5)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(before.equal(after) for before, after in zip(actual, scaled.parameters(), strict=True))
    assert scaler.get_scale() == 512.0


def test_muon_returns_what_the_closure_returns() -> None:
    model = tiny()
    optimizer = muon(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(5)).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    assert optimizer.step(closure) > optimizer.step(closure)
