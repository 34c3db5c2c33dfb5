"""Groups of runs that differ by the seed alone; expected quantiles are of scipy.stats.t.ppf(0.975, freedom)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.archive.groups import grouped, remarks, t_quantile, telling_keys, welch
from ddp_train.archive.index import Index
from ddp_train.run_folder.result import Status
from tests.unit.archive.finished import finished


def groups_below(folder: Path, **asked: str) -> tuple[list[tuple[str, int, list[str]]], list[str]]:
    """Return the typed settings, the number and the names of the runs of each group, and the remarks."""
    rows = Index(folder).rows(**asked)
    groups = grouped([*rows, *rows])  # a run counts once
    return [(group.label, group.n, [Path(run).name for run in group.folders]) for group in groups], remarks(rows, groups)


def test_seeds_are_one_group_and_the_best_one_is_certain_or_not(tmp_path: Path) -> None:
    for seed in range(3):
        finished(tmp_path / f"low{seed}", 0.5 + seed / 100, "optimizer.lr=0.01", f"seed={seed}", "name=x")
        finished(tmp_path / f"high{seed}", 0.7 + seed / 100, "optimizer.lr=0.1", f"seed={seed}", f"cluster.grace_s={10 + seed}")
    finished(tmp_path / "failed", 0.99, "optimizer.lr=0.1", status=Status.FAILED)
    groups, said = groups_below(tmp_path)
    assert groups == [("optimizer.lr=0.1", 3, ["high2", "high1", "high0"]), ("optimizer.lr=0.01", 3, ["low2", "low1", "low0"])]
    assert grouped(Index(tmp_path).rows())[0].settings == {"optimizer.lr": 0.1}
    assert said[0].startswith("the best is better than the next by 0.2 ± 0.023 (95% confidence): certain")
    finished(tmp_path / "one", 0.72, "optimizer.lr=0.3")
    assert "not certain: one run says nothing of the spread" in groups_below(tmp_path)[1][0]
    for seed in range(2):
        finished(tmp_path / f"wide{seed}", 0.6 + 0.3 * seed, "optimizer.lr=0.4", f"seed={seed}")
    assert "not certain with 2 runs and 3 runs" in groups_below(tmp_path, where="optimizer.lr IN (0.1, 0.4)")[1][0]


def test_the_same_run_again_and_one_that_was_cut_off_are_no_samples(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.5, "seed=1")
    finished(tmp_path / "again", 0.5, "seed=1", "cluster.grace_s=20", started=9)
    finished(tmp_path / "cut", 0.1, "seed=2", "debug.max_steps=3")
    assert groups_below(tmp_path)[0] == [("", 1, ["again"]), ("debug.max_steps=3", 1, ["cut"])]


def test_a_run_with_faults_and_a_reproduction_never_displace_an_ordinary_one(tmp_path: Path) -> None:
    finished(tmp_path / "base", 0.5, "seed=1")
    finished(tmp_path / "slow", 0.6, "seed=1", "debug.faults=[{kind: slow, rank: 0, step: 2, seconds: 1}]", started=5)
    again = finished(tmp_path / "again", 0.7, "seed=1", started=9)
    (again.root / "notes.json").write_text('{"reproduces": "base"}')
    group = grouped(Index(tmp_path).rows())[0]
    assert (group.n, group.folders) == (1, [f"{tmp_path}/base"])


def test_a_label_tells_a_group_from_all_others(tmp_path: Path) -> None:
    typed = ["trainer.grad_accum_steps=4", "cluster.processes_per_node=4", "optimizer.lr=0.1", "seed=3"]
    for number, word in enumerate(typed):
        finished(tmp_path / str(number), 0.9 - number / 10, f"trainer.global_batch_size={2 ** (number + 5)}", overrides=[word])
    found = [label for label, _, _ in groups_below(tmp_path)[0]]
    assert found[:3] == typed[:3] and len(set(found)) == 4  # the last one has typed its seed alone


def test_keys_that_were_typed_come_first_and_those_that_follow_from_them_last() -> None:
    rows = [
        {"model._target_": model, "model.width": width, "seed": seed, "lr": lr, "beta": n % 2, "decay": 2 * lr, "name": n, "fixed": 1}
        for n, (model, width, seed, lr) in enumerate([("a", 1, 0, 1), ("a", 1, 1, 1), ("b", 2, 0, 2), ("b", 2, 1, 3)])
    ]
    assert telling_keys(rows, ["lr", "seed", "model"]) == ["model._target_", "seed", "lr", "beta", "model.width", "decay"]
    assert telling_keys(rows, ["lr", "seed", "model"], most=2) == ["model._target_", "seed", "lr"]


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    for seed, value in enumerate((0.5, 0.6, float("inf"), float("nan"))):
        finished(tmp_path / str(seed), value, f"seed={seed}")
    assert groups_below(tmp_path) == ([("", 2, ["1", "0"])], ["left out: 2 without a finite value of the metric"])
    assert groups_below(tmp_path, where="last < 1")[1] == []


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047), (1.3, 7.5005293), (2, 4.3026527), (5, 2.5705818), (30, 2.0422725), (1000, 1.9623391), (1e5, 1.9599877)],
)
def test_students_quantile_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-6)


def test_means_and_their_difference_have_intervals(tmp_path: Path) -> None:
    values = {0.1: [0.1, 0.2, 0.3], 0.2: [0.5, 0.55, 0.6, 0.65], 0.3: [0.4, 0.4], 0.4: [0.4, 0.4], 0.5: [0.7]}
    for rate, each in values.items():
        for seed, value in enumerate(each):
            finished(tmp_path / f"{rate}_{seed}", value, f"optimizer.lr={rate}", f"seed={seed}")
    by_rate = {group.settings["optimizer.lr"]: group for group in grouped(Index(tmp_path).rows())}
    low, high, one, same, single = (by_rate[rate] for rate in values)
    assert (low.n, low.mean, low.deviation) == (3, pytest.approx(0.2), pytest.approx(0.1)) and single.half_width is None
    assert low.half_width == pytest.approx(0.43026527 / 3**0.5)
    assert welch(low, high) == pytest.approx(0.20211636)  # scipy.stats.ttest_ind(..., equal_var=False).confidence_interval()
    assert welch(single, low) is None and welch(one, same) == 0.0
