"""An optimizer gets back the state that was saved, in its own groups and types; what the configuration changes is said."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.training.parts.components import Components
from ddp_train.training.state import saved_state
from ddp_train.training.train_state import TrainState
from tests.unit.checkpoint.states import assert_same_state, saved
from tests.unit.parts import components, trainer


def test_a_run_that_goes_back_keeps_one_state_of_its_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=1")
    trainer(parts).train()
    path = saved(tmp_path, 1, parts)
    old = [weakref.ref(value) for values in parts.optimizer.state.values() for value in values.values()]
    alive = list[int]()
    real = parts.optimizer.load_state_dict

    def noted(state: dict[str, Any]) -> None:
        alive.append(sum(each() is not None for each in old))
        real(state)

    monkeypatch.setattr(parts.optimizer, "load_state_dict", noted)
    saved_state.start_from(path, parts, TrainState(), alone())
    assert len(old) > 6
    assert alive == [0]


def test_an_optimizer_with_states_of_another_type_gets_them_back_uncast(tmp_path: Path) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=1")
    trainer(parts).train()
    for values in parts.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].double() * (1 + 1e-12)
    other = components("optimizer=adamw", "trainer.max_steps=1")
    saved_state.start_from(saved(tmp_path, 1, parts), other, TrainState(), alone())
    assert_same_state(other, parts)


def test_a_weight_decay_changed_on_resuming_counts_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, 1, components("optimizer.weight_decay=0.1"))
    changed = components("optimizer.weight_decay=0.7")
    saved_state.start_from(path, changed, TrainState(), alone())
    assert [group["weight_decay"] for group in changed.optimizer.param_groups] == [0.7, 0.0]
    assert "optimizer group 0: weight_decay is 0.7 as configured; the checkpoint had 0.1" in capsys.readouterr().out


def test_a_weight_decay_that_is_switched_on_or_off_keeps_every_parameters_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def moments(parts: Components) -> dict[str, Tensor]:
        return {name: parts.optimizer.state[parameter]["exp_avg"] for name, parameter in parts.model.named_parameters()}

    base = ["trainer.max_steps=3", "scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR"]
    base += ["~scheduler.step_size", "~scheduler.gamma", "+scheduler.T_max=1"]  # one of those that keep a rate for each group
    for before, after in (("0.1", "0.0"), ("0.0", "0.1")):
        trained = components(*base, f"optimizer.weight_decay={before}")
        trainer(trained).train()
        path = saved(tmp_path / after, 1, trained)
        changed = components(*base, f"optimizer.weight_decay={after}")
        saved_state.start_from(path, changed, TrainState(), alone())
        for name, value in moments(trained).items():
            assert torch.equal(value, moments(changed)[name]), name
        assert f"weight_decay is {float(after)} as configured; the checkpoint had {float(before)}" in capsys.readouterr().out
        trainer(changed).train()
    path = saved(tmp_path / "other", 1, trained)  # one group, in another order than that of an optimizer that does not know of decay
    with pytest.raises(UserError, match="had the parameters in another order"):
        saved_state.start_from(path, components(*base, "~optimizer.weight_decay"), TrainState(), alone())
