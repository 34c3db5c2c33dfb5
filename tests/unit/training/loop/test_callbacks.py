"""Callbacks in the loop: when each event comes, what is logged, who is named, and how a run is stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train import interfaces
from ddp_train.config.schema import EVENTS
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, Run
from ddp_train.interfaces.run import implements
from ddp_train.run_folder.result import Status
from ddp_train.training.loop.callbacks import Callbacks, RunView
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.turns import Turns, make_turns
from ddp_train.training.record.logged import Reduction
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import EarlyEnd, TrainState, WindowSums
from tests.unit.parts import components, saved, services, trainer

HERE = "tests.unit.training.loop.test_callbacks"
SIX_STEPS = ["trainer.max_steps=6", "loader.micro_batch_size=32"]


class Diary:
    """Notes every event, and logs a few numbers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_start(self, run: Run) -> None:
        self.events.append(("start", run.step))

    def on_step(self, run: Run) -> None:
        self.events.append(("step", run.step))
        run.log("diary/step", torch.tensor(float(run.step)))
        if run.is_log_step:
            run.log("diary/host", 10 * run.step)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.events.append(("evaluation", run.step))
        run.log("diary/double", 2 * metrics["loss"])

    def on_save(self, run: Run) -> None:
        self.events.append(("save", run.step))

    def on_end(self, run: Run) -> None:
        self.events.append((run.status, run.step))

    def state_dict(self) -> dict[str, Any]:
        return {"num_events": len(self.events), "tensor": torch.arange(3.0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.events = [("loaded", state["num_events"])]


class Stopping:
    """Stops in the evaluation."""

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.step >= 4:
            run.stop("that is enough")


class StoppingSoon:
    """Stops in the first step."""

    def on_step(self, run: Run) -> None:
        run.stop("enough")


class Failing:
    def on_step(self, run: Run) -> None:
        raise RuntimeError("no luck")


class Nothing:
    """A callback that was meant for another trainer."""

    def train_start(self) -> None: ...


def nothing() -> Nothing:
    return Nothing()


class Talkative(nn.Module):
    """A model that logs from its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.linear = nn.Flatten(), nn.LazyLinear(10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.flat(images))
        ddp_train.log("model/size", logits.detach().abs().mean())
        ddp_train.log("model/one", 1)
        return logits


def run(**callbacks: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """Return what trains six steps with these callbacks, and its records."""
    parts, records = components(*SIX_STEPS), list[dict[str, Any]]()
    parts = replace(parts, callbacks=callbacks)
    return trainer(parts, log_every_steps=3, evaluate_every_steps=2, write=records.append), records


def test_every_event_comes_at_its_place_in_the_order_of_the_configuration() -> None:
    diary = Diary()
    training, records = run(diary=diary)
    assert training.train()
    training.end(Status.COMPLETED)
    steps = [[("step", step), *([("evaluation", step)] if step % 2 == 0 else [])] for step in range(1, 7)]
    assert diary.events == [("start", 0), *sum(steps, []), ("save", 6), ("completed", 6)]  # noqa: RUF017
    train, evaluated = ([record for record in records if record["split"] == split] for split in ("train", "eval"))
    assert [record["diary/step"] for record in train] == [2.0, 5.0]
    assert [record["diary/host"] for record in train] == [30.0, 60.0]
    assert [record["diary/double"] for record in evaluated] == [2 * record["loss"] for record in evaluated]
    assert training.services.records.last_values["eval/diary/double"] == evaluated[-1]["diary/double"]


def test_a_class_has_the_events_that_it_needs_and_a_run_without_steps_asks_for_none() -> None:
    class Inherits(Callback):
        def on_save(self, run: Run) -> None: ...

    training, _ = run(stopping=Stopping(), inherits=Inherits())
    assert training.hooks.after_step == [training.components.strategy.after_step]  # of no callback
    assert [name for name in vars(Callback) if not name.startswith("_")] == [*EVENTS, "evaluation_weights"]
    with pytest.raises(ConfigError, match="none of the methods on_start, on_step, on_evaluation, on_save, on_end"):
        components(f"+callbacks.mine._target_={HERE}.nothing")  # a function: what it returns is known on the ranks


def test_what_is_logged_is_read_with_the_one_read_of_a_log_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = run(diary=Diary())
    training.state.logged_names = ["diary/host", "diary/step"]  # as after the first record
    reads, counted = list[str](), list[int]()
    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda tensor, name=name, read=read: reads.append(name) or read(tensor))
    log = training._log

    def count(grad_norm: Tensor | None) -> None:
        reads.clear()
        log(grad_norm)
        counted.append(len(reads))

    monkeypatch.setattr(training, "_log", count)
    training.train()
    assert counted == [1, 1]


def test_a_model_logs_from_its_forward_in_training_and_nowhere_else() -> None:
    parts, records = components(*SIX_STEPS, "model=mlp"), list[dict[str, Any]]()
    model = Talkative()
    model(parts.train_loader.peek().batch[0])  # outside of a run it does nothing
    turns = Turns(partial(make_turns, model, parts.objective, parts.strategy, alone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = replace(parts, model=model, trained_module=model, turns=turns, optimizer=optimizer)
    trainer(parts, log_every_steps=3, evaluate_every_steps=2, write=records.append).train()
    train = [record for record in records if record["split"] == "train"]
    assert [record["model/one"] for record in train] == [1.0, 1.0]
    assert all(record["model/size"] > 0 for record in train)
    assert not any("model/one" in record for record in records if record["split"] == "eval")


def test_a_stop_ends_the_run_as_its_last_step_would() -> None:
    training, records = run(stopping=Stopping())
    saves: list[int] = []
    training.services = services(save=lambda window: saves.append(training.state.step))
    assert training.train()
    assert training.state.step == 4 and saves == [4]
    assert str(training.state.early_end) == "callbacks.stopping: that is enough"
    training, records = run(soon=StoppingSoon())
    assert training.train()
    assert training.state.step == 2  # the next evaluation, before a log step
    assert [(record["split"], record["step"]) for record in records] == [("eval", 2)]
    training, records = run(soon=StoppingSoon())
    training.evaluate_every_steps = 100
    assert training.train()
    assert training.state.step == 3  # the next log step
    assert [(record["split"], record["step"]) for record in records] == [("train", 3), ("eval", 3)]


def test_a_run_that_was_stopped_takes_no_step_when_it_is_continued() -> None:
    training, _ = run(diary=(diary := Diary()))
    training.state.step, training.state.early_end = 2, EarlyEnd.at("diary", "done", {})
    assert training.train()
    assert ("step", 3) not in diary.events
    configs = {"diary": {"_target_": "x", "patience": 3}}
    stopped = EarlyEnd.at("diary", "done", configs)
    assert stopped.holds(configs) and not stopped.holds({}) and not stopped.holds({"diary": {"_target_": "x", "patience": 4}})


def test_an_exception_names_the_callback() -> None:
    training, _ = run(failing=Failing())
    with pytest.raises(RuntimeError, match="no luck") as caught:
        training.train()
    assert caught.value.__notes__ == ["config key: callbacks.failing (in its `on_step`)"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("loss", 1.0, "has a 'loss' already"), ("a", torch.zeros(2), "shape \\[2\\]"), ("a", "text", "got a str")],
)
def test_what_is_no_number_of_its_own_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run()[0].logged.add(name, value)


def test_a_mean_is_that_of_the_finite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a step that is skipped: on the device, and the host waits for nothing."""
    training, _ = run()
    logged, lost, world = training.logged, torch.tensor(float("nan")), training.world
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
            patch.setattr(Tensor, name, lambda tensor, name=name: pytest.fail(name))
        for value in (torch.tensor(3.0), lost, lost + 1, 5, float("inf")):
            logged.add("a", value)
        logged.add("b", lost)
        logged.add("c", float("-inf"))
    logged.restart(WindowSums(**logged.state()))
    for names in ([], ["a", "b", "c"]):  # new ones, and those that all ranks agree on
        logged._state.logged_names = names
        reduction = Reduction(world)
        groups = logged.add_to(reduction)
        kept = dict(logged._sums)
        reduction.sum()
        assert logged.reduce_and_reset(world, groups) == pytest.approx({"a": 4.0, "b": math.nan, "c": math.nan}, nan_ok=True)
        logged._sums = kept


def test_a_state_is_saved_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, _ = run(diary=Diary(), other=Diary())
    training.train()
    checkpoint = saved(tmp_path, 6, training.components)
    again, _ = run(diary=Diary(), new=Diary())
    start_from(checkpoint, again.components, TrainState(), alone())
    assert again.components.callbacks["diary"].events[0][0] == "loaded"
    said = capsys.readouterr().out
    assert "callbacks.new has no state in the checkpoint" in said and "callbacks.other was removed" in said


def test_what_was_logged_before_a_checkpoint_is_in_the_record_after_it() -> None:
    training, _ = run()
    training.logged.add("a", torch.tensor(3.0))
    training.logged.add("a", 5)
    training.logged.end_request = EarlyEnd.at("mine", "why", {})
    sums = WindowSums(**training.logged.state())
    assert sums.logged == {"a": [8.0, 2.0, 2.0]}
    assert sums.end_request is not None and sums.end_request["callback"] == "mine" and WindowSums(**asdict(sums)) == sums
    again, records = run()
    again.state.saved_window = sums
    assert again.train()
    train = [record for record in records if record["split"] == "train"]
    assert [record["a"] for record in train] == [4.0]
    assert again.state.early_end is not None and again.state.step == 3
    assert again.state.state_dict()["early_end"] == vars(again.state.early_end)
    shared = [WindowSums.merged([sums, sums], is_main=is_main) for is_main in (True, False)]
    assert [each.logged for each in shared] == [{"a": [16.0, 4.0, 4.0]}, {}]


def test_a_callback_that_inherits_has_the_events_that_are_its_own() -> None:
    class Late(interfaces.Callback):
        def on_end(self, run: interfaces.Run) -> None:
            """Of its own."""

    assert implements(Late(), "on_end") and not implements(Late(), "evaluation_weights")
    assert not implements(Diary(), "evaluation_weights")


def test_a_callback_is_shown_nothing_but_what_the_protocol_has() -> None:
    training, _ = run()
    around = (training.components, training.state, training.world, training.services)
    callbacks = Callbacks(*around, logged=training.logged, is_log_step=training.is_log_step, settings={})
    shown = {name for name in dir(RunView(*around, callbacks)) if not name.startswith("_")}
    assert shown == {*Run.__annotations__, *(name for name in vars(Run) if not name.startswith("_"))}
