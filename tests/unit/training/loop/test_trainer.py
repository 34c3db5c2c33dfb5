"""The loop: its order, its stops, and its end when the loss is lost."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_train.errors import NonFiniteLossError
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.parts import ChosenStop, components, trainer


def test_lost_weights_are_never_saved() -> None:
    parts, saves = components("optimizer.lr=1e30", "scheduler=constant", "trainer.max_steps=50"), list[WindowSums]()
    with pytest.raises(NonFiniteLossError):
        trainer(parts, log_every_steps=50, decide_save=lambda step: step % 5 == 0, save=saves.append).train()
    assert saves == []


def test_a_lost_loss_ends_the_run() -> None:
    parts = components("optimizer.lr=1e30", "scheduler=constant", "trainer.max_steps=50")
    with pytest.raises(NonFiniteLossError, match=r"at step 2, the first one in steps 1 to 10; its samples: \d+, .* and 24 more"):
        trainer(parts, log_every_steps=10).train()


def test_the_best_value_of_each_metric_is_kept_with_its_step() -> None:
    state, records = TrainState(), list[Record]()
    trainer(components("trainer.max_steps=30", "optimizer.lr=0.01"), state, write=records.append, evaluate_every_steps=10).train()
    evaluations = {record["step"]: record for record in records if record["split"] == "eval"}
    assert list(evaluations) == [10, 20, 30]
    best = state.best["eval/loss"]
    assert best.value == min(record["loss"] for record in evaluations.values()) == evaluations[best.step]["loss"]


@pytest.mark.parametrize("comes", ["before the evaluation", "during the evaluation"])
def test_a_stop_saves_without_evaluating_and_the_evaluation_is_made_up_for(comes: str) -> None:
    parts, state, records, saved = components("trainer.max_steps=30"), TrainState(), list[Record](), list[dict[str, Any]]()
    stop = ChosenStop(10) if comes == "before the evaluation" else ChosenStop(asks=lambda: state.step == 10)
    around = {"write": records.append, "save": lambda window: saved.append(state.state_dict()), "stop": stop}
    one_run = trainer(parts, state, evaluate_every_steps=5, **around)
    assert not one_run.train()
    assert [(record["step"]) for record in records if record["split"] == "eval"] == [5]
    assert [(each["step"], each["evaluation_pending"]) for each in saved] == [(10, True)]
    if comes == "during the evaluation":
        assert not one_run.train()  # stopped again, while it makes up for it
        assert len(saved) == 1

    state.load_state_dict(saved[0])
    assert trainer(parts, state, write=records.append, evaluate_every_steps=5).train()
    assert [record["step"] for record in records if record["split"] == "eval"] == [5, 10, 15, 20, 25, 30]
    assert not state.evaluation_pending


def test_what_comes_after_the_first_step_comes_once_also_where_that_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    diary, state = list[tuple[str, int]](), TrainState()
    one_run = trainer(components("trainer.max_steps=4"), state)

    def rewind_once(step: int) -> None:
        if diary.count(("step", 2)) == 1:
            raise Rewind({}, "bad")

    def go_back(cause: Rewind) -> None:
        state.step = 0
        diary.append(("rewind", 2))

    one_run.hooks.after_step += [lambda step: diary.append(("step", step)), lambda step: rewind_once(step) if step == 2 else None]
    one_run.hooks.after_first_step.append(lambda: diary.append(("first", state.step)))
    monkeypatch.setattr(one_run.services.checkpoints, "rewind", go_back)
    assert one_run.train()
    steps = [("step", step) for step in (1, 2, 3, 4)]
    assert diary == [steps[0], ("first", 1), steps[1], ("rewind", 2), *steps]
