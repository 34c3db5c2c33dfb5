"""The index says what the folders say, whatever happens to either."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ddp_train
from ddp_train.archive import index as module
from ddp_train.archive.archived_run import BROKEN
from ddp_train.archive.index import FILE, Index
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.folder_lock import HOLDER
from tests.unit.archive.finished import a_sweep, config_text, finished, saved
from tests.unit.cli.runs import works_in


def rows(root: Path, **asked: Any) -> dict[str, dict[str, Any]]:
    return {os.path.relpath(row["folder"], root): row for row in Index(root).rows(**asked)}


def read_again(root: Path) -> int:
    """Return how many runs a new index has to read."""
    with mock.patch.object(module, "read", wraps=module.read) as read:
        Index(root)
    return read.call_count


def test_runs_are_found_at_any_depth_and_the_newest_comes_first(tmp_path: Path) -> None:
    finished(tmp_path / "a/1", 0.5, started=1)
    a_sweep(tmp_path / "b/sweeps/s", "0.01", "0.1")
    finished(tmp_path / "c", 0.7, started=30)
    finished(tmp_path / "a/1/evaluations/e", 0.1)  # of a run, and no run itself
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/config.yaml").write_text("a: 1\n")  # somebody's project
    (tmp_path / "again").symlink_to(tmp_path / "a")
    (tmp_path / "a/circle").symlink_to(tmp_path)
    found = rows(tmp_path)
    assert [*found] == ["c", "a/1", "b/sweeps/s/1", "b/sweeps/s/0"]
    row = found["b/sweeps/s/1"]
    assert (row["best"], row["last"], row["steps"], row["hosts"], row["ranks"]) == (0.6, 0.6, 100, 1, 2)
    assert (row["folder"], row["sweep"]) == (str(tmp_path / "b/sweeps/s/1"), str(tmp_path / "b/sweeps/s"))
    assert (row["status"], row["metric"], row["goal"], row["problem"], row["typed"]) == (
        Status.COMPLETED,
        "eval/accuracy",
        "max",
        "",
        "optimizer.lr=0.1",
    )
    assert row["size"] >= sum(path.stat().st_size for path in (tmp_path / "b/sweeps/s/1").rglob("*") if path.is_file())
    assert [*rows(tmp_path / "b/sweeps/s/1")] == ["."]
    (tmp_path / "b/elsewhere").symlink_to(tmp_path / "c")
    assert sorted(rows(tmp_path / "b")) == ["elsewhere", "sweeps/s/0", "sweeps/s/1"]


def test_what_has_changed_is_read_again_and_nothing_else(tmp_path: Path) -> None:
    runs = [finished(tmp_path / str(number), 0.1 * number) for number in range(4)]
    assert read_again(tmp_path) == 4 and read_again(tmp_path) == 0
    Result(status=Status.FAILED, step=3).write(runs[1].result)
    saved(runs[2])
    assert read_again(tmp_path) == 2
    assert rows(tmp_path)["1"]["status"] == Status.FAILED
    shutil.rmtree(runs[0].root)
    assert [*rows(tmp_path)] == ["1", "2", "3"]
    finished(tmp_path / "0", 0.9)
    assert rows(tmp_path)["0"]["best"] == 0.9
    tmp_path.joinpath("3").rename(tmp_path / "4")
    assert sorted(rows(tmp_path)) == ["0", "1", "2", "4"]


def test_whether_a_run_is_worked_in_is_asked_and_never_remembered(tmp_path: Path) -> None:
    run_folder = finished(tmp_path / "r", 0.5)
    process = works_in(run_folder)
    assert rows(tmp_path)["r"]["status"] == Status.RUNNING
    process.kill()
    process.wait()
    assert (run_folder.root / HOLDER).exists()  # it was killed
    assert rows(tmp_path)["r"]["status"] == Status.COMPLETED
    sweep = a_sweep(tmp_path / "s", "0.1")
    sweep.jobs[0].status = Status.RUNNING
    sweep.save()
    sweep.run_folder(sweep.jobs[0]).result.unlink()
    process = works_in(RunFolder(sweep.root))
    assert (rows(tmp_path)["s/0"]["status"], rows(tmp_path)["s/0"]["problem"]) == (Status.RUNNING, "")
    process.terminate()
    process.wait()
    assert rows(tmp_path, where="problem != ''")["s/0"]["status"] == Status.INTERRUPTED


def test_an_index_may_be_damaged_of_another_version_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "r", 0.5)
    expected = rows(tmp_path)["r"]["best"]
    for content in (b"", b"no database" * 1000, (tmp_path / FILE).read_bytes()[:5000]):
        (tmp_path / FILE).write_bytes(content)
        assert rows(tmp_path)["r"]["best"] == expected
    monkeypatch.setattr(module, "_VERSION", 7)
    assert read_again(tmp_path) == 1 and read_again(tmp_path) == 0
    (tmp_path / FILE).unlink()
    assert rows(tmp_path)["r"]["best"] == expected


def test_where_no_index_can_be_written_there_is_none(tmp_path: Path) -> None:
    finished(tmp_path / "r", 0.5)
    (tmp_path / FILE).mkdir()
    assert [*rows(tmp_path)] == ["r"] and read_again(tmp_path) == 1


def test_commands_at_the_same_time_say_the_same(tmp_path: Path) -> None:
    for number in range(30):
        finished(tmp_path / str(number), 0.01 * number)
    code = f"from pathlib import Path; from ddp_train.archive.index import Index; print(len(Index(Path({str(tmp_path)!r})).rows()))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0].strip() for process in started] == ["30"] * 4
    assert read_again(tmp_path) == 0


def test_sql_knows_columns_keys_and_metrics(tmp_path: Path) -> None:
    a_sweep(tmp_path, "0.01", "0.1", "1.0")
    for where, found in {
        "optimizer.lr > 0.05": {"1", "2"},
        '"optimizer.lr" > 0.05 AND eval/accuracy < 0.65': {"1"},
        "status = 'completed' AND model._target_ LIKE '%MLP'": {"0", "1", "2"},
        "best / steps > 0.0055": {"1", "2"},
        "seed = 0 AND name = 'optimizer.lr'": set(),
        "age_days > 1 AND size > 0 AND init_from IS NULL": {"0", "1", "2"},
        "tags LIKE '%x%' OR folder LIKE '%/1'": {"1"},
    }.items():
        assert set(rows(tmp_path, where=where)) == found, where
    assert [*rows(tmp_path, sort="best")] == ["2", "1", "0"] and [*rows(tmp_path, sort="-best")] == ["0", "1", "2"]
    assert [*rows(tmp_path, sort="optimizer.lr")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("where", "happened", "fix"),
    [
        ("optimizer.rl > 1", "no run has optimizer.rl", "optimizer.lr"),
        ("statsu = 'failed'", "no such column: statsu", "status"),
        ("status = ", "syntax error", ""),
        ("1; DROP TABLE runs", "syntax error", ""),
    ],
)
def test_sql_that_is_wrong_is_told_what_there_is(tmp_path: Path, where: str, happened: str, fix: str) -> None:
    finished(tmp_path / "r", 0.5)
    with pytest.raises(ConfigError) as caught:
        Index(tmp_path).rows(where=where)
    assert happened in caught.value.happened and caught.value.fix == fix
    assert "name, status, age_days" in caught.value.expected
    assert len(Index(tmp_path).rows()) == 1


def test_broken_runs_are_listed_and_marked(tmp_path: Path) -> None:
    for name in ("silent", "cut", "other", "strange"):
        finished(tmp_path / name, 0.5)
    (tmp_path / "silent/result.json").unlink()
    (tmp_path / "cut/result.json").write_text('{"status": "comp')
    (tmp_path / "other/config.yaml").write_text(config_text().replace("\ntrainer:", "\ntraining:"))
    (tmp_path / "strange/result.json").write_text(json.dumps({"status": "completed", "metrics": [1], "step": {"a": 1}}))
    found = rows(tmp_path)
    assert {name: row["status"] for name, row in found.items()} == {
        "silent": Status.INTERRUPTED,
        "cut": BROKEN,
        "other": BROKEN,
        "strange": BROKEN,
    }
    assert found["silent"]["problem"] == "it ended without writing result.json" and found["silent"]["last"] == 1.0
    assert "cut" not in found["cut"]["problem"] and "result.json cannot be read" in found["cut"]["problem"]
    assert "another version" in found["other"]["problem"] and "of another form" in found["strange"]["problem"]


def test_ten_thousand_runs_are_listed_in_a_moment(tmp_path: Path) -> None:
    """A tenth of them, in a tenth of 2 s of processor time."""
    first = finished(tmp_path / "0", 0.5)
    saved(first)
    for number in range(1, 1000):
        shutil.copytree(first.root, tmp_path / str(number))
    Index(tmp_path)
    began = time.process_time()
    assert len(Index(tmp_path).rows()) == 1000
    assert time.process_time() - began < 0.2


def test_rows_are_dicts_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_sweep(tmp_path / "outputs/s", "0.1", "0.2")
    monkeypatch.chdir(tmp_path)
    runs = ddp_train.runs(sort="best")
    assert isinstance(runs, list) and all(isinstance(row, dict) for row in runs)  # what pandas and polars take
    best, other = runs
    assert (best["folder"], best["best"], best["optimizer.lr"], best["eval/accuracy"]) == ("outputs/s/1", 0.6, 0.2, 0.6)
    assert best.keys() == other.keys()
    assert best.config["optimizer"]["lr"] == 0.2 and best.metrics[0] == {"split": "train", "step": 10, "loss": 10.0}
    assert [item.values for item in best.compare(other).differences["config"]] == [[0.2, 0.1]]
    assert [row["folder"] for row in ddp_train.runs("outputs", "outputs/s", where="optimizer.lr > 0.15")] == ["outputs/s/1"]
    assert copy.copy(best) == best
    with pytest.raises(ConfigError, match="there is no folder nowhere"):
        ddp_train.runs("nowhere")


def test_a_notebook_shows_them_without_a_script(tmp_path: Path) -> None:
    a_sweep(tmp_path, "0.1", "0.2")
    runs = ddp_train.runs(tmp_path)
    table, run = runs._repr_html_(), runs[0]._repr_html_()
    assert table.count("<tr>") == 3 and "<td>0.6</td>" in table and table.count("<svg") == 1 and table.count('stroke-width="1.5"') == 2
    assert run.count("<svg") == 2 and "completed, step 100" in run and "optimizer.lr=0.2" in run
    assert "script" not in table + run
    assert ddp_train.runs(tmp_path, where="best > 1")._repr_html_().count("<tr>") == 1


def test_one_strange_run_does_not_break_the_list(tmp_path: Path) -> None:
    """Names and texts that are no UTF-8, a list with what JSON does not have, a circle, a number of 400 digits."""
    strange = tmp_path / os.fsdecode(b"caf\xe9")
    finished(strange, 0.5, overrides=["note=\ud800"])
    (strange / "notes.json").write_text(json.dumps({"note": "\ud800"}))
    for name, text in {"infinite": "x: [.inf, .nan]", "circle": "x: &x [*x]", "large": f"x: {'9' * 400}"}.items():
        file = finished(tmp_path / name, 0.5).config
        file.write_text(f"{file.read_text()}{text}\n")
    metrics = finished(tmp_path / "metric", 0.5)
    metrics.result.unlink()
    metrics.metrics.write_text(f'{{"split": "train", "step": 1, "loss": {"9" * 400}}}\n')
    for _ in range(2):
        found = rows(tmp_path)
        assert set(found) == {strange.name, "infinite", "circle", "large", "metric"}
        assert found[strange.name]["note"] == "\ud800" and found["circle"]["status"] == BROKEN and found["infinite"]["problem"] == ""
        assert read_again(tmp_path) == 0
        assert "infinite" in rows(tmp_path, where="trainer.max_steps = 100")
    assert {row.root.name for row in ddp_train.runs(tmp_path)} == set(found)
    with pytest.raises(ConfigError, match="--where"):
        rows(tmp_path, where="name = it's")
    assert rows(tmp_path, where='name = "it\'s"') == {}


def test_a_damaged_page_of_an_index_is_made_anew(tmp_path: Path) -> None:
    for number in range(30):
        finished(tmp_path / str(number), 0.5)
    expected = rows(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    for page in range(1, size // 4096):
        with (tmp_path / FILE).open("r+b") as file:
            file.seek(4096 * page)
            file.write(b"\xff" * 4096)
        assert {**rows(tmp_path, where="trainer.max_steps = 100")}.keys() == expected.keys()
        if page > 5:
            break


def test_several_folders_are_one_list(tmp_path: Path) -> None:
    for folder, number in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        finished(tmp_path / folder / str(number), 0.1 * number, started=number)
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a/3"]
    for sort, order in {"": "4321", "best": "4321", "-best": "1234", "started": "1234"}.items():
        assert "".join(row.root.resolve().name for row in ddp_train.runs(*folders, sort=sort)) == order
    assert [row["best"] for row in ddp_train.runs(*folders, sort="best", limit=1)] == [0.4]
