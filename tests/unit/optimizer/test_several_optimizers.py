"""Several optimizers behind one, among them Muon with AdamW: each has its own parameters, and a checkpoint sees one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ddp_train.errors import ConfigError
from ddp_train.optimizer import MuonAdamW, muon
from ddp_train.optimizer.several_optimizers import several
from tests.unit.optimizer.tiny import names, tiny

PARTS = {"0": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "1": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()


def test_each_part_steps_by_its_own_rule_and_biases_are_not_decayed() -> None:
    network, other = model(), model()
    optimizer = several(network, parts=PARTS)
    apart = [torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9)]
    groups = [{"params": [other[1].weight], "weight_decay": 0.2}, {"params": [other[1].bias], "weight_decay": 0.0}]
    apart.append(torch.optim.AdamW(groups, lr=0.01))  # type: ignore[arg-type]
    for _ in range(3):
        step(network, optimizer)
        other.zero_grad()
        other(torch.ones(5, 3)).square().sum().backward()
        for each in apart:
            each.step()
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), other.parameters(), strict=True))


def test_its_state_is_that_of_one_optimizer() -> None:
    network = model()
    optimizer = several(network, parts=PARTS)
    step(network, optimizer)
    again = copy.deepcopy(network)
    loaded = several(again, parts=PARTS)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(network, optimizer)
    step(again, loaded)
    assert all(torch.equal(left, right) for left, right in zip(network.parameters(), again.parameters(), strict=True))


def test_every_parameter_is_in_one_part() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are in no part: 1\.weight, 1\.bias"):
        several(model(), parts={"0": PARTS["0"]})
    with pytest.raises(ConfigError, match=r"0\.bias is in an earlier part"):
        several(model(), parts={**PARTS, "*.bias": PARTS["1"]})


class WithModes(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_part_with_modes_is_refused_and_not_trained_without_them() -> None:
    with pytest.raises(ConfigError, match="WithModes evaluates other weights"):
        several(nn.Linear(2, 2), parts={"*": partial(WithModes, lr=0.1)})


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
