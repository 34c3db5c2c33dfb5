"""When a checkpoint is due, which of them stay, and that there is room for them is known before training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.checkpoint.catalog import CatalogEntry
from ddp_train.checkpoint.manifest import Ranking
from ddp_train.checkpoint.schedule import CheckpointSchedule, Retention, to_remove
from tests.unit.checkpoint.states import saved
from tests.unit.parts import LOSS


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
        ask_to_save=lambda: True,
        clock=lambda: times[0],
    )


def evaluated(step: int, loss: float) -> dict[str, Any]:
    return {"split": "eval", "step": step, "epoch": 1.0, "samples": 32, "time": 0.0, "loss": loss}


values = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 1.5, math.nan, math.inf]))
folders = st.dictionaries(st.integers(1, 60), values, max_size=12)


@settings(deadline=None)
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


@settings(deadline=None)
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
    assert [step for step in range(1, 10) if schedule(every_steps=4).decide(step, is_agreed=False)] == [4, 8]
    assert not any(schedule().decide(step, is_agreed=False) for step in range(1, 10))

    clock = [0.0]
    by_time, due = schedule(every_minutes=0.5, every_steps=7, clock=clock), []
    for step in range(1, 12):
        clock[0] += 12.0
        due += [step] if by_time.decide(step, is_agreed=False) else []
    assert due == [3, 6, 7, 10]  # a checkpoint for another reason begins the minutes again

    each = schedule(every_evaluation=True)
    for step, split in enumerate(("train", "eval", "eval"), start=1):
        each.note({**evaluated(step, 0.5), "split": split})
        assert each.decide(step, is_agreed=False) == (split == "eval")
    assert not each.decide(4, is_agreed=False)

    best, due = schedule(best=2, saved=[entry(1, 1.0), entry(2, 0.9), entry(3, 0.4)]), []
    for step, loss in enumerate([0.95, 0.8, 0.8, math.nan, 0.3, 0.5], start=4):
        best.note({**evaluated(step, -1.0), "split": "train"})
        best.note(evaluated(step, loss))
        due += [step] if best.decide(step, is_agreed=False) else []
    assert due == [5, 8]
    assert not best.decide(10, is_agreed=False)  # without an evaluation of its own
    assert best.metrics_of(10) == {}
    assert best.metrics_of(9) == {"train/loss": -1.0, "eval/loss": 0.5}


def test_after_going_back_the_best_that_were_lost_bar_no_others() -> None:
    run = schedule(best=1, saved=[entry(1, 0.9)])
    for step, loss in ((2, 0.8), (3, 0.1)):
        run.note(evaluated(step, loss))
        assert run.decide(step, is_agreed=False)
    run.go_back([entry(1, 0.9), entry(2, 0.8)])  # the third was left behind
    assert run.metrics_of(3) == {}
    run.note(evaluated(3, 0.85))
    assert not run.decide(3, is_agreed=False)
    run.note(evaluated(4, 0.7))
    assert run.decide(4, is_agreed=False)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        saved(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000010"]
