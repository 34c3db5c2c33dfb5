"""Evaluation: every sample once, and nothing left changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World, alone
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Evaluated
from ddp_train.interfaces.objective import evaluate_batch
from ddp_train.loader.reader import MicroBatch
from ddp_train.objective.classification import Classification
from ddp_train.objective.supervised import LossObjective
from ddp_train.scheduler.schedule import Plateau
from ddp_train.training.loop.evaluation import evaluate, in_lockstep, on_any_rank
from ddp_train.training.parts.evaluated_weights import averages
from ddp_train.training.state.checkpoints import ranking_of
from ddp_train.training.train_state import TrainState
from tests.unit.parts import ChosenStop, components, trainer


def test_evaluation_leaves_the_model_in_training_mode_and_counts_every_sample() -> None:
    parts = components()
    parts.model.train()
    metrics = evaluate(parts, alone())
    assert parts.model.training
    assert metrics is not None
    assert metrics["accuracy"] * 101 == pytest.approx(round(metrics["accuracy"] * 101))


SETS = ["+evaluation.sets.noisy.split=eval", "+evaluation.sets.noisy.noise=3.0", "+evaluation.sets.few={num_samples: 3}"]


def test_each_set_is_measured_as_if_it_were_alone() -> None:
    parts = components(*SETS)
    found = evaluate(parts, alone())
    assert found is not None and list(parts.eval_loaders) == ["", "noisy", "few"]
    for name, loader in parts.eval_loaders.items():
        own = evaluate(replace(parts, eval_loaders={"": loader}), alone())
        assert own == {each.removeprefix(f"{name}/"): value for each, value in found.items() if each.rpartition("/")[0] == name}
    assert round(found["few/accuracy"] * 3) / 3 == found["few/accuracy"]
    assert list(parts.goals) == [f"{part}{name}" for part in ("", "noisy/", "few/") for name in parts.objective.goals]


def test_sets_with_names_are_evaluated_where_the_data_without_one_is_null() -> None:
    assert next(iter(components(*SETS, "data.eval=null").goals)) == "noisy/accuracy"


def test_an_evaluation_that_is_stopped_in_a_later_set_has_no_metrics_and_is_owed() -> None:
    records: list[Any] = []
    parts, state, asked = components(*SETS, "trainer.max_steps=1"), TrainState(), iter([False] * len(components().eval_loader or ()))
    assert not trainer(parts, state, write=records.append, stop=ChosenStop(asks=lambda: next(asked, True))).train()
    assert state.evaluation_pending and [record["split"] for record in records] == ["train"]
    assert trainer(parts, state, write=records.append).train()
    assert {"loss", "noisy/loss", "few/loss"} <= records[-1].keys() and records[-1]["split"] == "eval"


def test_a_metric_of_a_set_leads_what_follows_metrics() -> None:
    words = ["scheduler=plateau", "scheduler.metric=few/loss", "checkpoint.metric=eval/noisy/accuracy"]
    parts = components(*SETS, *words, "trainer.max_steps=1", "callbacks=[early_stopping]", "callbacks.early_stopping.metric=eval/few/loss")
    run = trainer(parts)
    assert run.train()
    assert isinstance(parts.scheduler, Plateau)
    last_values = run.services.records.last_values
    assert parts.scheduler.scheduler.best == last_values["eval/few/loss"] == parts.callbacks["early_stopping"].state_dict()["best"]
    assert run.state.best["eval/noisy/accuracy"].value == last_values["eval/noisy/accuracy"]
    assert ranking_of(parts, "eval/noisy/accuracy").goal == "max"
    with pytest.raises(ConfigError, match=r"checkpoint\.metric: is 'eval/nosy/loss'[\s\S]*expected: one of .*eval/noisy/loss"):
        ranking_of(parts, "eval/nosy/loss")


class OneUse:
    """Mixed precision of one's own, whose contexts can be entered once, as those of `contextmanager`."""

    def __init__(self) -> None:
        self.entered = 0

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        self.entered += 1
        yield

    def scaler(self, device: torch.device, world_size: int = 1) -> Any:
        return torch.amp.GradScaler(device.type, enabled=False)


def test_each_batch_has_a_context_of_its_own_in_training_and_in_evaluation() -> None:
    parts = components("evaluation.batch_size=32", "loader.micro_batch_size=16", "trainer.grad_accum_steps=2", "trainer.max_steps=3")
    parts = replace(parts, amp=OneUse())
    trainer(parts).train()
    assert parts.amp.entered == 3 * 2 + 4  # 101 samples are four batches


class Averages:
    """A callback that has one weight for evaluation."""

    def __init__(self, name: str, weight: Any) -> None:
        self.weights = {name: weight}

    def evaluation_weights(self) -> dict[str, Any]:
        return self.weights


class Lost(Averages):
    def evaluation_weights(self) -> dict[str, Any]:
        raise RuntimeError("no luck")


def test_weights_for_evaluation_that_do_not_fit_name_the_callback_and_the_parameter() -> None:
    parts = components()
    name, own = next(parts.model.named_parameters())
    for wrong, weight, said in (
        (name + "s", own, f"gives {name}s: float32 .*which is None in the model"),
        (name, own[:1], rf"gives {name}: float32 \[1, .*which is float32 \["),
        (name, None, f"gives {name}: None, which is float32"),
    ):
        parts = replace(parts, callbacks={"mine": Averages(wrong, weight)})
        with pytest.raises(ConfigError, match=said) as caught:
            evaluate(parts, alone())
        assert caught.value.key == "callbacks.mine"
    parts = replace(parts, callbacks={"mine": Lost(name, own)})
    with pytest.raises(RuntimeError, match="no luck") as lost:
        evaluate(parts, alone())
    assert lost.value.__notes__ == ["config key: callbacks.mine (in its `evaluation_weights`)"]
    parts = replace(parts, callbacks={"mine": Averages(name, own.half())})
    assert averages(parts).keys() == {name}


@dataclass(frozen=True, kw_only=True)
class Heard(World):
    """Adds to each value what the other ranks say then."""

    others: list[int] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        assert values.device.type == "cpu", "the host would wait for the device"
        return values + self.others.pop(0)


def world(*others: int) -> World:
    return Heard(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("meta"), others=list(others))


def test_a_rank_that_is_through_goes_on_with_its_last_batch_which_does_not_count() -> None:
    batches = [MicroBatch(torch.tensor([1.0])), MicroBatch(torch.tensor([2.0]))]
    found = list(in_lockstep(iter(batches), world(1, 1, 1, 1, 0)))
    assert [float(each.batch) for each in found] == [1, 2, 2, 2]
    assert [each.is_stand_in for each in found] == [False, False, True, True]


def test_a_rank_with_more_goes_on_when_the_others_are_through() -> None:
    batches = [MicroBatch(torch.tensor([float(number)])) for number in range(3)]
    assert list(in_lockstep(iter(batches), world(1, 0, 0, 0))) == batches


def test_all_stop_when_one_is_asked_to() -> None:
    is_asked = on_any_rank(lambda: False, world(0, 1))
    assert [is_asked(), is_asked()] == [False, True]


def test_values_may_have_any_name() -> None:
    parts, names = components("evaluation.batch_size=32"), ("gave_up", "skipped_samples", "loss /")
    parts.objective.evaluate = lambda model, batch: {name: torch.ones(len(batch[0])) for name in names}  # type: ignore[method-assign]
    parts.objective.metrics = lambda means: means  # type: ignore[method-assign]
    assert evaluate(parts, alone()) == dict.fromkeys(names, 1.0)


class Half(Classification):
    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        return super().evaluate(model, batch)._replace(rows={"half": torch.full((len(batch[0]), 2), 0.5)})


def test_values_of_samples_are_rows_and_rows_are_what_is_said() -> None:
    parts = components()
    batch = next(iter(parts.eval_loaders[""])).batch
    rows = evaluate_batch(Half(), parts.model, batch).rows
    assert list(rows) == ["accuracy", "accuracy_top5", "loss", "half"]
    assert rows["half"].shape == (len(batch[0]), 2) and rows["accuracy"].dtype == torch.bool
    only_means = evaluate_batch(LossObjective(nn.CrossEntropyLoss()), parts.model, batch)
    assert list(only_means.rows) == ["output"]


def test_predictions_of_an_objective_that_has_no_rows_are_refused(tmp_path: Path) -> None:
    parts = components()
    parts.objective.evaluate = lambda model, batch: {"loss": torch.tensor(1.0)}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"evaluation\.save_predictions: is true, and Classification\.evaluate gives nothing"):
        evaluate(parts, alone(), predictions=lambda name: tmp_path / "there")
