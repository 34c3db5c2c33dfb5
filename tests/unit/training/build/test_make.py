"""A component of any class is taken where it has what the run needs, and else refused with its key and by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.config.targets.target import FACTS
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, ConfigErrors, UserError
from ddp_train.interfaces import Run, Strategy
from ddp_train.interfaces.run import WriterFacts
from ddp_train.system.phase import Phases
from ddp_train.training.build.make import make_callbacks, make_strategy, make_writers
from ddp_train.training.state import saved_state
from ddp_train.training.train_state import TrainState
from tests.unit.checkpoint.states import assert_same_state
from tests.unit.parts import checked, components, saved, trainer


def config(kind: type) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{kind.__name__}"}


class Open:
    """A metric writer without `close`."""

    def write(self, record: object) -> None: ...


class Whole:
    """A strategy that does not inherit from ours."""

    def prepare(self, model: Any, device: Any, world_size: int) -> Any:
        return model


def test_the_check_knows_the_facts_that_writers_get() -> None:
    assert FACTS["metrics"] == tuple(WriterFacts.__annotations__)


def test_a_writer_without_close_is_refused_when_it_is_made() -> None:
    facts = WriterFacts(run_dir="", config={}, hyper_parameters={}, step=0, total_steps=1, phases=Phases())
    with pytest.raises(
        ConfigError, match=r"(?s)metrics\.mine\._target_: gave a Open, which lacks close.*ddp_train\.interfaces\.MetricWriter"
    ):
        make_writers({"mine": config(Open)}, facts)


def test_a_strategy_without_prepare_is_refused_and_one_with_it_is_adapted() -> None:
    assert isinstance(make_strategy(config(Whole)), Strategy)
    with pytest.raises(ConfigError, match=r"strategy\._target_: gave a Open, which lacks prepare"):
        make_strategy(config(Open))


class Misspelt:
    def on_end(self, run: Run) -> None: ...

    def on_evaluate(self, run: Run, metrics: Mapping[str, float]) -> None: ...


class OfAnotherTrainer:
    def on_end(self, run: Run) -> None: ...

    def on_log(self, logs: object) -> None: ...


class Helped:
    """Its other members are its own business: no name begins with `on_`, but that of a value."""

    on_one_rank = True

    def on_step(self, run: Run) -> None:
        self.step(run)

    def step(self, run: Run) -> None: ...

    def save(self, path: str) -> None: ...


@pytest.mark.parametrize(
    ("kind", "wrong", "fix"), [(Misspelt, "on_evaluate", r"did you mean on_evaluation\?"), (OfAnotherTrainer, "on_log", "another name")]
)
def test_a_method_that_is_named_as_an_event_and_is_none_is_refused(kind: type, wrong: str, fix: str) -> None:
    said = rf"has a method {wrong}, which is no event: it would never be called\n  expected: on_start, .*\n  fix: {fix}"
    with pytest.raises(ConfigErrors, match=rf"callbacks\.mine\._target_: {__name__}\.{kind.__name__} {said}"):
        checked(f"+callbacks.mine._target_={__name__}.{kind.__name__}")
    with pytest.raises(ConfigError, match=rf"callbacks\.mine\._target_: gave a {kind.__name__}, which {said}"):
        make_callbacks({"mine": config(kind)})


def test_another_method_of_a_callback_is_its_own() -> None:
    assert isinstance(make_callbacks({"mine": config(Helped)})["mine"], Helped)


DEEP = ["model.depth=3", "trainer.max_steps=3", "scheduler=warmup_linear"]


def first_layer() -> str:
    return next(name for name, _ in components(*DEEP).model.named_parameters()).rpartition(".")[0]


def test_groups_and_layers_train_with_their_own_rates_under_a_schedule() -> None:
    frozen = first_layer()
    groups = [
        f"+optimizer.groups.stem={{match: {frozen}, freeze: true}}",
        "+optimizer.groups.bias={match: '*.bias', lr: 0.5, betas: [0.5, 0.9]}",
    ]
    parts = components(*DEEP, *groups, "optimizer.layer_decay=0.5", "optimizer.lr=0.01")
    before = {name: parameter.clone() for name, parameter in parts.model.named_parameters()}
    rates = [(group["name"], group["initial_lr"], tuple(group["betas"])) for group in parts.optimizer.param_groups]
    assert rates[0] == ("rest", 0.01, (0.9, 0.95))
    assert rates[1] == ("rest", 0.005, (0.9, 0.95))
    assert rates[-1] == ("bias", 0.5, (0.5, 0.9))
    trainer(parts).train()
    changed = {name for name, parameter in parts.model.named_parameters() if not parameter.equal(before[name])}
    assert changed == {name for name in before if not name.startswith(frozen)}
    last = [group["lr"] / group["initial_lr"] for group in parts.optimizer.param_groups]
    assert last == pytest.approx([last[0]] * len(last))


def test_a_rate_that_is_missing_is_asked_for() -> None:
    bare = ["model.depth=3", "optimizer._target_=torch.optim.NAdam", *(f"~optimizer.{name}" for name in ("lr", "betas", "eps", "fused"))]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: is not given"):
        components(*bare, "optimizer.layer_decay=0.5")


def test_what_is_frozen_is_all_that_there_is() -> None:
    with pytest.raises(ConfigError, match="the model has no parameter to train"):
        components("+optimizer.groups.all={match: '*', freeze: true}")


def test_groups_come_back_from_a_checkpoint_and_are_not_mixed_up(tmp_path: Path) -> None:
    """Two layers alike in shape: the optimizer's state knows parameters by their places alone."""
    base = [*DEEP, "model.width=8"]
    layers = [name.rpartition(".")[0] for name, each in components(*base).model.named_parameters() if tuple(each.shape) == (8, 8)]
    assert len(layers) == 2
    one, other = (f"+optimizer.groups.slow={{match: {layer}, lr: 0.001}}" for layer in layers)
    parts = components(*base, one)
    trainer(parts).train()
    path = saved(tmp_path, 3, parts)
    again = components(*base, one)
    saved_state.start_from(path, again, TrainState(), alone())
    assert_same_state(again, parts)
    with pytest.raises(UserError, match=r"the optimizer had the parameters in another order: .* where .* is now"):
        saved_state.start_from(path, components(*base, other), TrainState(), alone())


def test_groups_change_nothing_where_they_say_the_same() -> None:
    plain, grouped = (components(*DEEP, *more) for more in ([], ["+optimizer.groups.bias={match: '*.bias', lr: ${optimizer.lr}}"]))
    for parts in (plain, grouped):
        trainer(parts).train()
    torch.testing.assert_close(list(grouped.model.parameters()), list(plain.model.parameters()), rtol=0, atol=0)


PLATEAU = ["scheduler=plateau", "evaluation.every_steps=1", "scheduler.patience=0", "scheduler.threshold=10.0", "trainer.max_steps=4"]


def evaluated(*overrides: str) -> list[float]:
    """Return the rate after each of the run's steps."""
    parts = components(*PLATEAU, "optimizer.lr=0.01", *overrides)
    rates: list[float] = []
    trainer(parts, evaluate_every_steps=1, decide_save=lambda step: bool(rates.append(float(parts.scheduler.get_last_lr()[0])))).train()
    return rates


def test_plateau_follows_the_evaluation() -> None:
    """No value is ten times better, so that every evaluation but the first cuts the rate."""
    assert evaluated() == pytest.approx([1e-2, 1e-3, 1e-4, 1e-5])
    assert evaluated("scheduler.metric=loss", "scheduler.threshold=-1000.0") == [0.01] * 4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["scheduler.metric=bleu"], r"scheduler\.metric: is 'bleu', which the objective does not measure(.|\n)*accuracy"),
        (["+scheduler.mode=min", "scheduler.metric=accuracy"], r"scheduler\.mode: is min, and a larger accuracy is better"),
    ],
)
def test_a_metric_that_cannot_be_followed_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        components(*PLATEAU, *overrides)


def test_a_scheduler_of_epochs_counts_them_and_auto_is_their_number() -> None:
    cosine = ["scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "+scheduler.T_max=auto"]
    cosine += ["~scheduler.step_size", "~scheduler.gamma", "scheduler.every=epoch"]
    parts = components(*cosine, "trainer.max_steps=null", "trainer.max_epochs=2", "optimizer.lr=1.0", "trainer.global_batch_size=160")
    assert parts.scheduler.scheduler.T_max == 2  # type: ignore[attr-defined]
    rates: list[float] = []
    trainer(parts, decide_save=lambda step: bool(rates.append(float(parts.scheduler.get_last_lr()[0])))).train()
    assert rates == pytest.approx([1.0] * 3 + [0.5] * 4 + [0.0])


def test_the_steps_of_the_run_and_of_an_epoch_answer_auto() -> None:
    cycle = ["scheduler=step", "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.step_size", "~scheduler.gamma"]
    cycle += ["+scheduler.max_lr=0.1", "+scheduler.steps_per_epoch=auto", "+scheduler.epochs=2", "+scheduler.total_steps=null"]
    parts = components(*cycle, "trainer.max_steps=7", "trainer.global_batch_size=160")
    assert parts.scheduler.total_steps == 8  # type: ignore[attr-defined]
    assert parts.answers["scheduler.steps_per_epoch"] == 4


def test_a_checkpoint_before_the_first_evaluation_has_no_best_value_yet(tmp_path: Path) -> None:
    again = components(*PLATEAU)
    saved_state.start_from(saved(tmp_path, 1, components(*PLATEAU)), again, TrainState(), alone())
    assert again.scheduler.scheduler.best == -float("inf")  # type: ignore[attr-defined]
