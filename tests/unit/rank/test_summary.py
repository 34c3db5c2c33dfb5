"""What a person reads at the start is what will happen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

from ddp_train.distributed.world import alone
from ddp_train.launch.job import Job
from ddp_train.rank import summary
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.training.build.build import build
from ddp_train.training.train_state import EarlyEnd, TrainState
from tests.unit.parts import checked


def plan(*overrides: str, frozen: bool = False) -> str:
    run = checked(*overrides)
    parts = build(run, alone())
    if frozen:
        next(parts.model.parameters()).requires_grad_(False)
    return summary.plan(Job(config=run, run_folder=RunFolder(Path()), command=[], overrides=[]), parts, TrainState())


def test_a_global_batch_that_the_data_cannot_fill_is_not_said_to_be_used() -> None:
    assert "\ndata     its 640 samples are fewer than a global batch: each step takes all of them, not 1,000" in plan(
        "trainer.global_batch_size=1000"
    )
    assert "fewer" not in plan("trainer.global_batch_size=640")


def test_all_parameters_are_counted_and_those_that_are_trained() -> None:
    assert "model    MLP, 13,018 parameters, all trained\n" in plan()
    assert "model    MLP, 13,018 parameters, 730 of them trained\n" in plan(frozen=True)


def test_a_run_that_is_cut_off_says_so_and_names_the_whole_one_next() -> None:
    assert "\nsteps    4 (" in plan("debug=fast")
    assert "\ndebug    the run ends there; its schedules are those of the whole run" in plan("debug=fast")
    assert "debug" not in plan()
    words = ["model=mlp", "debug=fast", "+model.bias=true", "debug.max_steps=8"]
    job = Job(config=checked("debug=fast"), run_folder=RunFolder(Path("run")), command=[], overrides=words, options=["--config-dir=mine"])
    result = Result(status=Status.COMPLETED, step=4, samples=4, seconds=1.0, metrics={"last": {}, "best": {}})
    assert summary.closing(job, TrainState(), result).endswith("ddp-train --config-dir=mine model=mlp +model.bias=true")


def test_commands_can_be_typed_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make train` the environment is not active."""
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", "/usr/bin")
    assert f"{folder.name}/ddp-train resume run` continues" in summary.stopped(RunFolder(Path("run")), 3)
    monkeypatch.setenv("PATH", str(folder))
    assert "`ddp-train resume " in summary.stopped(RunFolder(Path("run")), 3)


def test_a_schedule_that_ends_with_the_run_begins_anew_in_a_longer_one() -> None:
    """Resumed, its learning rate would jump up."""
    result = Result(status=Status.COMPLETED, step=20, samples=4, seconds=1.0, metrics={"last": {}, "best": {}})

    def onward(*words: str) -> str:
        overrides = ["model=mlp", "trainer.max_epochs=1", "hydra.run.dir=run", *words]
        job = Job(config=checked(*words), run_folder=RunFolder(Path("run")), command=[], overrides=overrides)
        return summary.closing(job, TrainState(), result).splitlines()[-1].partition("ddp-train ")[2]

    assert onward().startswith("model=mlp trainer.max_epochs=")
    assert onward("scheduler=constant").startswith("resume run trainer.max_epochs=")


class Module(nn.Module):
    """As Lightning's: it brings its own steps."""

    def __init__(self, **unused: object) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images)
        return logits

    def training_step(self, batch: object, number: int) -> None:
        raise AssertionError

    def configure_optimizers(self) -> None:
        raise AssertionError


def test_steps_that_a_model_brings_are_said_to_be_not_called() -> None:
    text = plan("model._target_=tests.unit.rank.test_summary.Module")
    assert "model    training_step, configure_optimizers of Module are not called: the objective, optimizer and scheduler" in text


def test_layers_are_listed_where_they_are_asked_for() -> None:
    assert "Linear" not in plan() and "\n           0     Linear" in plan("summary=2")


def test_tensorboard_is_tried_next_where_it_was_written() -> None:
    result = Result(status=Status.COMPLETED, step=4, samples=4, seconds=1.0, metrics={"last": {}, "best": {}})
    for overrides, is_written in ([], True), (["~metrics.tensorboard"], False):
        job = Job(config=checked(*overrides, base=[]), run_folder=RunFolder(Path("run")), command=[], overrides=overrides)
        assert ("tensorboard --logdir" in summary.closing(job, TrainState(), result)) is is_written


def test_how_fast_it_was_is_said_where_tokens_are_counted() -> None:
    job = Job(config=checked(), run_folder=RunFolder(Path("run")), command=[], overrides=[])
    for last, said in ({}, False), ({"train/tokens_per_s": 51200.4, "train/mfu": 0.41}, True):
        result = Result(status=Status.COMPLETED, step=4, samples=4, seconds=1.0, metrics={"last": last, "best": {}})
        assert ("at the end           51,200 tokens/s, MFU 41.0%" in summary.closing(job, TrainState(), result)) is said


def test_what_the_patterns_of_groups_have_matched_is_said() -> None:
    text = plan("model.depth=2", "+optimizer.groups.bias={match: '*.bias', lr: 0.5}", "optimizer.layer_decay=0.5", "optimizer.lr=0.1")
    assert "\ngroup    rest: 12,704 parameters in 3 tensors, lr 0.025 to 0.1\ngroup    bias: 42 parameters in 3 tensors, lr 0.5" in text
    assert "group" not in plan()


def test_a_run_that_a_callback_has_stopped_goes_on_without_it() -> None:
    state = TrainState(early_end=EarlyEnd.at("early_stopping", "why", {}))
    job = Job(config=checked(), run_folder=RunFolder(Path("run")), command=[], overrides=[])
    assert "resume run '~callbacks.early_stopping'` would continue" in summary.over(job, state)


def test_data_rate_and_schedule_are_named() -> None:
    assert "\ndata     SyntheticImages\n" in plan() and "\nrate     0.1 (SGD, warmup_cosine)" in plan("optimizer=sgd")
