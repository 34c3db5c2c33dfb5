"""`ddp-train runs` on runs that have trained: a small sweep, one that failed, one that was killed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ddp_train.cli import main
from ddp_train.cli.runs import aligned, number, plot
from ddp_train.config.command.commands import COMMANDS
from ddp_train.errors import DataError
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.conftest import TINY, Project, wait_for
from tests.fake_runner import FakeRunner
from tests.unit.archive.finished import finished
from tests.unit.cli.runs import works_in

pytestmark = pytest.mark.distributed
RUNNER = FakeRunner(lambda job: 99)
FEW = [*TINY, "cluster.processes_per_node=1", "trainer.log_every_steps=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = Project(tmp_path_factory.mktemp("trained"))
    rates = ["seed=0,1", "optimizer.lr=0.001,0.01", "trainer.max_steps=4"]
    swept = project.run("-m", "name=sweep", "hydra.sweep.dir=outputs/s", *rates, *FEW, timeout=300)
    assert swept.returncode == 0, swept.output
    failed = project.run("hydra.run.dir=outputs/failed", "trainer.max_steps=4", "debug.faults=[{kind: exception, step: 2}]", *FEW)
    assert failed.returncode == 1
    killed = project.start("hydra.run.dir=outputs/killed", "trainer.max_steps=100000", "trainer.max_epochs=10000", *FEW)
    wait_for(lambda: RunFolder(project.folder / "outputs/killed").metrics.exists())
    killed.kill()
    killed.communicate()
    assert project.run("init_from=outputs/s/0", "hydra.run.dir=outputs/later", "trainer.max_steps=2", *FEW).returncode == 0
    return project.folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, in which the user stands."""
    shutil.copytree(trained / "outputs", tmp_path / "outputs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def type_(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main.run(["runs", *words], RUNNER) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_all_runs_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = type_(capsys)
    lines = {line.split()[0]: line.split()[1:3] for line in shown.splitlines()[1:8]}
    assert set(lines) == {*(f"outputs/s/{number}" for number in range(4)), "outputs/failed", "outputs/killed", "outputs/later"}
    assert lines["outputs/s/1"][0] == "completed" and lines["outputs/failed"][0] == "failed"
    assert lines["outputs/killed"] == ["interrupted", "!"]
    assert "! outputs/killed: it ended without writing result.json" in shown and "7 of 7 runs; 1 marked" in shown
    rows = [json.loads(line) for line in type_(capsys, "--json", "--where", "optimizer.lr = 0.01 AND status = 'completed'").splitlines()]
    assert {row["folder"] for row in rows} == {"outputs/s/1", "outputs/s/3"}
    assert rows[0]["optimizer.lr"] == 0.01 and rows[0]["eval/accuracy"] == rows[0]["last"]
    assert "2 of 7 runs, all with --limit=0" in type_(capsys, "--limit=2", "outputs")
    assert shown.split()[:9] == ["run", "status", "age", "time", "metric", "best", "last", "steps", "size"]  # and no hosts: there is one
    type_(capsys, "tag", "outputs/s/1", "paper")
    assert type_(capsys).splitlines()[0].split()[8:] == ["size", "tags", "typed"]
    assert "no run has optimizer.rl" in type_(capsys, "--where=optimizer.rl>1", code=2)
    values = [json.loads(line)["last"] for line in type_(capsys, "outputs/s", "--json").splitlines()]
    assert values == sorted(values, reverse=True)  # of a sweep the best job is the first


def test_seeds_are_grouped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = type_(capsys, "--group", "outputs/s", "--sort=best").splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["2", "2"]
    assert {line.split()[-1] for line in shown[1:3]} == {"optimizer.lr=0.001", "optimizer.lr=0.01"}
    assert shown[3] == "2 groups of completed runs" and shown[4].startswith("the best is better than the next by")
    assert json.loads(type_(capsys, "--group", "--limit=1", "--json", "outputs/s").splitlines()[0])["n"] == 2


def test_one_run_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = type_(capsys, "show", "outputs/s/0")
    assert "outputs/s/0: done" in shown and "ran on   1 rank on" in shown and "saved    step" in shown
    assert "eval/accuracy " in shown and "train/loss" in shown and "└" in shown
    assert shown.count("train/grad_norm") == 1  # in the table alone
    assert "outputs/killed: not running; again" in type_(capsys, "show", "outputs/killed")
    assert json.loads(type_(capsys, "show", "outputs/failed", "--json"))["status"] == "failed"
    (folder / "s/0/config.yaml").write_text("a: [")
    assert "! config.yaml cannot be read" in type_(capsys, "show", "outputs/s/0")


def test_of_a_failed_run_the_whole_reason_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder, why = finished(tmp_path / "r", 0.5, status=Status.FAILED), f"the file {'x' * 300} is missing"
    Result(status=Status.FAILED, step=100, error=f"DataError: {why}").write(run_folder.result)
    assert type_(capsys, "show", str(tmp_path / "r")).count(why) == 1
    run_folder.result.unlink()
    failure.from_exception(DataError(happened=why), rank=3, step=7).record(run_folder)
    shown = type_(capsys, "show", str(tmp_path / "r"))
    assert shown.startswith(f"{tmp_path}/r: failed; `ddp-train resume {tmp_path}/r` continues it from the start\n")
    assert shown.count(why) == 1 and "The run failed: rank 3 on " in shown and "rank's log" in shown


def test_runs_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = type_(capsys, "compare", "outputs/s/0", "outputs/s/1")
    assert "optimizer.lr  0.001 (typed)  0.01 (typed)" in shown and "data: the same" in shown and "B - A" in shown
    shown = type_(capsys, "compare", "outputs/s/0", "outputs/s/2", "outputs/killed")
    assert "order: seed" in shown and "C  outputs/killed  interrupted, " in shown and "C - A" in shown
    found = json.loads(type_(capsys, "compare", "--json", "outputs/s/0", "outputs/s/1"))
    assert found["differences"]["config"][0]["name"] == "optimizer.lr"
    assert "one run was given" in type_(capsys, "compare", "outputs/s/0", code=2)
    assert "  train/samples_per_s " in shown and "  seconds " in shown


def test_a_difference_is_seen_and_equal_curves_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, faults = f"init_from={tmp_path}/{'deep/' * 20}", "debug.faults=[{kind:slow,rank:0,phase:step,step:20,attempt:0,seconds:0.015}]"
    for letter, overrides in (("a", [f"{long}1/checkpoints/last", faults]), ("b", [f"{long}2/checkpoints/last"]), ("c", [])):
        run_folder = finished(tmp_path / letter, 0.75 if letter == "c" else 0.5, *overrides)
        folder = {"name": "x", "folder": "/x", "commit": 40 * letter, "changed": [], "kept": {"a_file_of_a_long_name" * 9: letter}}
        run_folder.code_list.write_text(json.dumps({"folders": [folder]}))
    shown = type_(capsys, "compare", *(str(tmp_path / letter) for letter in "abc"))
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "deep/1/checkpoints/last" in rows["init_from"] and "deep/2/checkpoints/last" in rows["init_from"]
    assert f"{faults.partition('=')[2]} (typed)" in rows["debug.faults"] and "debug.faults." not in shown
    assert rows["commits"].split()[1:] == ["a" * 12, "b" * 12, "c" * 12]
    hashes = [word for word in rows["files"].split() if word.startswith("(")]
    assert len({*hashes}) == 3
    assert shown.count("A and B are the same") == 2 and shown.count("A and C are the same") == 1  # eval/accuracy differs


@pytest.mark.parametrize("word", COMMANDS["runs"].words)
def test_each_word_has_help_of_its_own(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = type_(capsys, word, "--help")
    assert shown.startswith(f"ddp-train runs {word} ") and shown.count("ddp-train runs") == 1
    assert f"\n{shown.rstrip()}" in type_(capsys, "--help")


def test_runs_get_tags_and_a_note(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    type_(capsys, "tag", "outputs/s/1", "paper", "good")
    assert "good" in type_(capsys, "tag", "outputs/s/1", "paper", "--remove")
    type_(capsys, "note", "outputs/s/1", "the one of table 2")
    assert [json.loads(line)["note"] for line in type_(capsys, "--json", "--where=tags = 'good'").splitlines()] == ["the one of table 2"]
    type_(capsys, "note", "outputs/s/1", "")
    assert json.loads((folder / "s/1/notes.json").read_text()) == {"tags": ["good"], "note": None}
    (folder / "s/2/notes.json").write_text('{"note": "long work')
    for words in (["tag", "outputs/s/2", "x"], ["note", "outputs/s/2", "x"]):
        assert "outputs/s/2/notes.json cannot be read" in type_(capsys, *words, code=2)
    assert (folder / "s/2/notes.json").read_text() == '{"note": "long work'
    assert "ddp-train runs tag RUN NAME" in type_(capsys, "tag", code=2)
    assert "no tag was given" in type_(capsys, "tag", "outputs/s/1", code=2) and "no text" in type_(capsys, "note", "outputs/s/1", code=2)


def test_others_than_the_best_are_removed_after_asking(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "which runs stay?" in type_(capsys, "clean", code=2)
    reading, writing = os.openpty()
    with os.fdopen(reading), os.fdopen(writing) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("builtins.input", lambda question: "n")
        assert "can be removed" in type_(capsys, "clean", "--keep=best=1", "--keep", "where=name='sweep'", "--where=status='failed'")
        assert (folder / "failed").exists()
        monkeypatch.setattr("builtins.input", lambda question: "y")
        type_(capsys, "clean", "--where=status='failed'")
        assert not (folder / "failed").exists()
    with open(os.devnull) as nothing, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", nothing)
        shown = type_(capsys, "clean", "--keep=last=1")
        assert "outputs/later  stays: --keep=last=1\n" in shown and "\n3 runs can be removed, " in shown
        assert shown.endswith("\nnothing was removed; --yes removes them\n") and (folder / "s/1").exists()
        rows = [json.loads(line) for line in type_(capsys, "clean", "--keep=last=1", "--json").splitlines()]
        assert {row["run"]: row["stays"] for row in rows}["outputs/later"] == "--keep=last=1" and (folder / "s/1").exists()
    process = works_in(RunFolder(folder / "killed"))
    shown = type_(capsys, "clean", "--where=1", "--checkpoints", "--keep=where=folder='outputs/later'", "--yes")
    assert "s/0/checkpoints  stays: outputs/later uses it" in shown and (folder / "s/0/checkpoints").exists()
    assert not (folder / "s/1/checkpoints").exists() and (folder / "s/1/result.json").exists() and (folder / "later/checkpoints").exists()
    type_(capsys, "clean", "--where=1", "--yes")
    assert not (folder / "s").exists() and not (folder / "later").exists() and (folder / "killed").exists()
    process.terminate()
    process.wait()


def test_columns_are_aligned_and_cut_to_the_terminal() -> None:
    rows = [["run", "steps"], ["a\x1b[31m", "5"], ["一二", "100"]]
    assert aligned(rows, right=[1]) == ["run        steps", "a\\x1b[31m      5", "一二         100"]
    assert aligned(rows, right=[1], width=8) == ["run    …", "a\\x1b[3…", "一二         100"[:7] + "…"]
    assert aligned([]) == []


def test_curves_are_drawn_by_letter() -> None:
    lines = plot({"A": [(0, 0.0), (10, 1.0)], "B": [(0, 1.0), (5, None), (10, 1.0)]})
    assert lines[0] == f"        1 │{'B' * 64}" and lines[7].startswith("        0 │AAA")
    assert lines[-1].split() == ["0", "step", "10"]
    assert plot({"A": []}) == [] and plot({"A": [(1, None)]}) == []
    assert plot({"A": [(40, 0.5)]})[-1].split() == ["40", "step", "40"]


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 3, 0.123456, "x", True, 10990.4)] == ["", "3", "0.1235", "x", "True", "10,990"]
    assert number(0.5, "+") == "+0.5" and number(-12345.6, "+") == "-12,346"
