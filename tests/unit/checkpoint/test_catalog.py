"""When checkpoints are saved, which stay, and which one is the best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.checkpoint.catalog import CatalogEntry, Ranking, candidates, find, ranking, saved
from ddp_train.checkpoint.schedule import CheckpointSchedule, Retention, to_remove
from ddp_train.errors import ConfigError, UserError
from tests.unit.parts import LOSS

ACCURACY = Ranking(metric="eval/accuracy", goal="max")


def entry(step: int, value: float | None = None) -> CatalogEntry:
    metrics = {} if value is None else {"eval/loss": value}
    return CatalogEntry(path=Path(f"step_{step:08d}"), step=step, metrics=metrics, ranking=LOSS)


def schedule(
    *, clock: list[float] | None = None, saved: list[CatalogEntry] | None = None, best: int = 0, **periods: Any
) -> CheckpointSchedule:
    times = clock or [0.0]
    return CheckpointSchedule(
        **{"every_evaluation": False, "every_steps": None, "every_minutes": None, **periods},
        keep=Retention(last=2, best=best, ranking=LOSS),
        saved=saved or [],
        agree=lambda step, is_due: is_due,
        clock=lambda: times[0],
    )


def evaluated(step: int, loss: float) -> dict[str, Any]:
    return {"split": "eval", "step": step, "epoch": 1.0, "samples": 32, "time": 0.0, "loss": loss}


values = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 1.5, math.nan, math.inf]))
folders = st.dictionaries(st.integers(1, 60), values, max_size=12)


@given(folders, st.integers(1, 4), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 7)), st.sampled_from(["min", "max"]))
def test_what_stays_is_the_newest_the_best_and_every_nth(
    found: dict[int, float | None], last: int, best: int, every: int | None, goal: str
) -> None:
    there = [entry(step, value) for step, value in sorted(found.items())]
    keep = Retention(last=last, best=best, every_steps=every, ranking=Ranking(metric="eval/loss", goal=goal))
    removed = {each.step for each in to_remove(there, keep)}
    stays = set(found) - removed
    finite = {step: value for step, value in found.items() if value is not None and math.isfinite(value)}
    by_quality = sorted(finite, key=lambda step: (finite[step] if goal == "min" else -finite[step], step))
    assert stays == set(sorted(found)[-last:]) | set(by_quality[:best]) | {step for step in found if every and step % every == 0}
    assert {each.step for each in to_remove([each for each in there if each.step in stays], keep)} == set()  # once is enough


@given(folders, st.integers(1, 3), st.integers(0, 3))
def test_removing_after_each_save_leaves_what_removing_at_the_end_does(found: dict[int, float | None], last: int, best: int) -> None:
    keep = Retention(last=last, best=best, ranking=LOSS)
    there: list[CatalogEntry] = []
    for step, value in sorted(found.items()):
        there.append(entry(step, value))
        gone = to_remove(there, keep)
        there = [each for each in there if each not in gone]
    everything = [entry(step, value) for step, value in sorted(found.items())]
    assert there == [each for each in everything if each not in to_remove(everything, keep)]


def test_steps_minutes_and_the_best_make_a_checkpoint_due() -> None:
    assert [step for step in range(1, 10) if schedule(every_steps=4).saves_after(step)] == [4, 8]
    assert not any(map(schedule().saves_after, range(1, 10)))

    clock = [0.0]
    by_time, due = schedule(every_minutes=0.5, every_steps=7, clock=clock), []
    for step in range(1, 12):
        clock[0] += 12.0
        due += [step] if by_time.saves_after(step) else []
    assert due == [3, 6, 7, 10]  # a checkpoint for another reason begins the minutes again

    each = schedule(every_evaluation=True)
    for step, split in enumerate(("train", "eval", "eval"), start=1):
        each.note({**evaluated(step, 0.5), "split": split})
        assert each.saves_after(step) == (split == "eval")
    assert not each.saves_after(4)

    best, due = schedule(best=2, saved=[entry(1, 1.0), entry(2, 0.9), entry(3, 0.4)]), []
    for step, loss in enumerate([0.95, 0.8, 0.8, math.nan, 0.3, 0.5], start=4):
        best.note({**evaluated(step, -1.0), "split": "train"})
        best.note(evaluated(step, loss))
        due += [step] if best.saves_after(step) else []
    assert due == [5, 8]
    assert not best.saves_after(10)  # without an evaluation of its own
    assert best.facts(10)["metrics"] == {}
    assert best.facts(9) == {"metrics": {"train/loss": -1.0, "eval/loss": 0.5}, "ranked_by": {"metric": "eval/loss", "goal": "min"}}


def test_after_going_back_the_best_that_were_lost_bar_no_others() -> None:
    run = schedule(best=1, saved=[entry(1, 0.9)])
    for step, loss in ((2, 0.8), (3, 0.1)):
        run.note(evaluated(step, loss))
        assert run.saves_after(step)
    run.go_back([entry(1, 0.9), entry(2, 0.8)])  # the third was left behind
    assert run.facts(3)["metrics"] == {}
    run.note(evaluated(3, 0.85))
    assert not run.saves_after(3)
    run.note(evaluated(4, 0.7))
    assert run.saves_after(4)


def test_the_metric_is_the_objectives_and_has_a_direction() -> None:
    goals = {"accuracy": "max", "loss": "min"}
    assert ranking(goals, metric=None, is_evaluated=True) == ACCURACY
    assert ranking(goals, metric="eval/loss", is_evaluated=True) == LOSS
    assert ranking(goals, metric=None, is_evaluated=False) == Ranking(metric="train/loss", goal="min")
    with pytest.raises(ConfigError, match=r"(?s)eval/los'.*one of eval/accuracy, eval/loss\n.*checkpoint.metric=eval/loss"):
        ranking(goals, metric="eval/los", is_evaluated=True)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        ranking(goals, metric="eval/loss", is_evaluated=False)


def put(folder: Path, step: int, metrics: Mapping[str, Any], ranked_by: Ranking = LOSS) -> Path:
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"facts": {"metrics": metrics, "ranked_by": vars(ranked_by)}}))
    (path / "COMPLETE").touch()
    return path


def test_best_and_last_are_found_by_name_and_damaged_ones_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match="best is no checkpoint"):
        find(folder / "best", lambda path: "best is no checkpoint", key="resume")
    one = put(folder, 1, {"eval/loss": 0.5, "eval/accuracy": 0.1})
    two = put(folder, 2, {"eval/loss": 0.4, "eval/accuracy": 0.2})
    three = put(folder, 3, {"eval/loss": 0.6, "eval/accuracy": 0.3})
    four = put(folder, 4, {})
    (put(folder, 5, {"eval/loss": 0.0}) / "COMPLETE").unlink()
    (put(folder, 6, {"eval/loss": 0.0}) / "manifest.json").write_text("[" * 100_000)
    assert candidates(folder / "best") == [two, one, three]
    assert candidates(folder / "last") == [four, three, two, one]
    assert find(folder / "best", lambda path: "a file is damaged" if path == two else "", key="resume") == one
    assert "checkpoint step_00000002 is not used: a file is damaged" in capsys.readouterr().out
    put(folder, 7, {}, ranked_by=ACCURACY)  # the run goes on under another metric
    assert candidates(folder / "best") == [three, two, one]
    with pytest.raises(UserError, match="every one of them is damaged"):
        find(folder / "last", lambda path: "damaged", key="resume")


def test_a_name_without_a_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        find(folder / "last", lambda path: "", key="resume")
    put(folder, 1, {"train/loss": 1.0})
    with pytest.raises(ConfigError, match="none of the 1 checkpoints was saved right after an evaluation"):
        find(folder / "best", lambda path: "", key="resume")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.1", [0.1], 10**400])
def test_what_is_no_finite_number_is_never_the_best(tmp_path: Path, value: Any) -> None:
    put(tmp_path, 1, {"eval/loss": value})
    two = put(tmp_path, 2, {"eval/loss": 0.7})
    assert len(saved(tmp_path)) == 2
    assert candidates(tmp_path / "best") == [two]
