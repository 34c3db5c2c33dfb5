"""AdamW: torch's numbers and hooks, and torch's own step only where something is to be done beside the kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.optimizer import adamw
from ddp_train.optimizer.adamw import AdamW

STEPS = 6


class Twins:
    """The same parameters twice: with ours, and with torch's AdamW."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [kind(self.groups(model), **{"lr": 0.1, "fused": True, **settings}) for kind, model in self.each()]

    def each(self) -> list[tuple[type[torch.optim.AdamW], nn.Module]]:
        return list(zip((AdamW, torch.optim.AdamW), self.models, strict=True))

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.3},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]

    def train(self, steps: int = STEPS, before: Callable[[torch.optim.AdamW, nn.Module, int], Any] = lambda *_: None) -> None:
        for step in range(steps):
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            for optimizer, model in zip(self.optimizers, self.models, strict=True):
                optimizer.zero_grad()
                model(inputs).square().sum().backward()
                before(optimizer, model, step)
                optimizer.step()

    def assert_same(self) -> None:
        ours, theirs = ([*model.parameters()] for model in self.models)
        assert all(map(torch.equal, ours, theirs))
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        assert states[0].keys() == states[1].keys()
        for number, state in states[0].items():
            assert state.keys() == states[1][number].keys()
            assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has a number for each time that torch's own step was asked for."""
    times, real = list[int](), adamw._torch_step
    monkeypatch.setattr(adamw, "_torch_step", lambda *given: (times.append(1), real(*given))[1])
    return times


def test_numbers_are_torchs_to_the_bit_and_its_step_is_asked_for_once(asked: list[int]) -> None:
    def change_rate(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    twins = Twins()
    twins.train(before=change_rate)
    twins.assert_same()
    assert len(asked) == 1  # which makes the state


@pytest.mark.parametrize(
    "settings", [{"maximize": True}, {"amsgrad": True}, {"lr": torch.tensor(0.1)}, {"fused": False}, {"capturable": True}], ids=str
)
def test_every_setting_is_torchs(settings: dict[str, Any], asked: list[int]) -> None:
    if "capturable" in settings and not torch.cuda.is_available():
        settings = {**settings, "fused": True}
    twins = Twins(**settings)
    twins.train()
    twins.assert_same()
    assert len(asked) == (1 if "maximize" in settings else STEPS)


def test_a_parameter_without_a_gradient_stays(asked: list[int]) -> None:
    def drop(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        if step in (2, 3):
            model.get_parameter("0.bias").grad = None

    twins = Twins()
    twins.train(before=drop)
    twins.assert_same()
    assert len(asked) == 3  # the first, and the two


def test_a_parameter_that_is_trained_later_is_found() -> None:
    def thaw(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        if step < 2:
            model.get_parameter("0.weight").grad = None

    twins = Twins()
    twins.train(before=thaw)
    twins.assert_same()


def test_a_state_that_is_loaded_is_gone_on_from(asked: list[int]) -> None:
    twins = Twins()
    twins.train()
    kept = copy.deepcopy(twins.optimizers[1].state_dict())
    twins.train()
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(copy.deepcopy(kept))
    twins.train()
    twins.assert_same()
    assert len(asked) == 1


def test_what_others_put_into_the_state_is_taken() -> None:
    def put(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        if step == 2:
            state = optimizer.state[model.get_parameter("0.weight")]
            state["exp_avg"] = torch.ones_like(state["exp_avg"])
        if step == 3:
            weight = model.get_parameter("2.weight")
            optimizer.state[weight] = {name: value.clone() for name, value in optimizer.state[weight].items()}
            optimizer.state[weight]["exp_avg"].zero_()
        if step == 4:
            optimizer.state.clear()

    twins = Twins()
    twins.train(before=put)
    twins.assert_same()


def test_parameters_and_groups_that_come_later_are_taken() -> None:
    def change(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": model.extra.parameters()})  # type: ignore[union-attr,operator]
        if step == 4:  # as a strategy does that cuts them
            old = optimizer.param_groups[0]["params"][0]
            new = nn.Parameter(old.detach())
            new.grad = old.grad
            optimizer.param_groups[0]["params"][0] = new
            optimizer.state[new] = optimizer.state.pop(old)

    twins = Twins()
    for model in twins.models:
        torch.manual_seed(1)
        model.extra = nn.Linear(2, 2)
        model.register_forward_hook(lambda module, inputs, outputs: module.extra(outputs))  # type: ignore[operator]
    twins.train(before=change)
    twins.assert_same()


def test_a_step_that_a_guard_leaves_out_is_left_out(asked: list[int]) -> None:
    def tell(optimizer: torch.optim.AdamW, model: nn.Module, step: int) -> None:
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(step == 3))  # type: ignore[attr-defined]

    twins = Twins()
    twins.train(before=tell)
    twins.assert_same()
    assert len(asked) == STEPS


def test_hooks_are_called_and_a_profiler_finds_the_step(asked: list[int]) -> None:
    twins, seen = Twins(), list[str]()
    twins.train()
    ours = twins.optimizers[0]
    before = ours.register_step_pre_hook(lambda *_: seen.append("before"))
    after = ours.register_step_post_hook(lambda *_: seen.append("after"))
    twins.train(1)
    before.remove()
    after.remove()
    assert seen == ["before", "after"]
    twins.train(1)
    with torch.profiler.profile(acc_events=True) as profile:
        twins.train(1)
    twins.assert_same()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}
    assert len(asked) == 3  # the first, that with hooks, and the profiled one


def test_a_closure_is_called() -> None:
    twins = Twins()
    twins.train()
    loss: Tensor = twins.optimizers[0].step(lambda: torch.tensor(7.0))  # type: ignore[assignment]
    assert loss == 7.0


def test_a_copy_goes_on_as_the_original() -> None:
    twins = Twins()
    twins.train()
    twins.models[0], twins.optimizers[0] = copy.deepcopy((twins.models[0], twins.optimizers[0]))
    twins.train()
    twins.assert_same()
