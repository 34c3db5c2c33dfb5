"""`ddp-train reproduce` says what it changes, refuses what would be another run, and finds data where it lies."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.cli.reproduce import _changes, _export, _paths, _run_again, reproduce
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.fake_runner import FakeRunner
from tests.unit.archive.test_reproduction import begun
from tests.unit.cli.runs import a_run
from tests.unit.launch.repository import project

__all__ = ["project"]

RUNNER = FakeRunner(lambda job: 1)


def test_the_ranks_and_threads_of_the_run_are_kept_and_what_was_typed_comes_first(tmp_path: Path) -> None:
    a_run(tmp_path)
    run = ArchivedRun(tmp_path)
    run.environment = {"ranks": [{"device": "cpu (x86_64)", "threads": 3}] * 2}
    (tmp_path / "metrics.jsonl").write_text('{"split": "train", "step": 7, "loss": 1.0}\n')
    run.config["debug"]["faults"] = [{"kind": "kill"}]
    least = 20 * run.config["trainer"]["log_every_steps"] - 19  # steps with which records are of the same steps
    changes = _changes(run, ["cluster.processes_per_node=1", "~metrics.wandb", "data.root=/x"])
    assert {"cluster.threads_per_process=3", "debug.faults=[]", f"debug.max_steps={max(7, least)}"} <= {*changes}
    assert [each for each in changes if "processes_per_node" in each] == ["cluster.processes_per_node=1"]
    run.config["trainer"] |= {"max_steps": 400, "log_every_steps": 50}  # records of as many steps need more than it would have taken
    assert not [each for each in _changes(run, []) if "max_steps" in each]
    with pytest.raises(ConfigError, match="1e3 is no number of steps"):
        _changes(run, ["debug.max_steps=1e3"])
    with pytest.raises(ConfigError, match="would change what the run computes"):
        _changes(run, ["optimizer.lr=1"])


def test_relative_paths_lie_where_the_run_was_started_or_here_unless_the_code_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, code, here = (tmp_path / name for name in ("began", "code", "here"))
    for folder in (began / "data", code, here / "weights"):
        folder.mkdir(parents=True)
    (code / "words.txt").touch()
    (began / "words.txt").touch()
    monkeypatch.chdir(here)
    run = ArchivedRun(tmp_path)
    run.environment = {"working_directory": str(began)}
    model = {"_target_": "a.B", "name": "auto", "folder": "weights"}
    run.config = {"data": {"root": "data", "words_file": "words.txt", "other_path": "absent"}, "model": model}
    assert [*_paths(run, ["x=1"], code)] == [f"data.root={began}/data", f"model.folder={here}/weights"]
    assert [*_paths(run, ["data.root=/y", "model.folder=z"], code)] == []


def test_what_cannot_be_reproduced_is_named(tmp_path: Path) -> None:
    a_run(tmp_path)
    with pytest.raises(ConfigError, match="it has not begun, or is an evaluation"):
        reproduce([str(tmp_path)], RUNNER)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ConfigError, match=r"environment\.json cannot be read"):
        reproduce([str(tmp_path)], RUNNER)
    (tmp_path / "environment.json").write_text(json.dumps({"run": "abc"}))
    with pytest.raises(ConfigError, match="ended before its code was kept"):
        reproduce([str(tmp_path)], RUNNER)
    with tarfile.open(tmp_path / "bundle.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "config.yaml", "config.yaml")
    with pytest.raises(ConfigError, match="may come from another user"):
        reproduce([str(tmp_path / "bundle.tar.gz")], RUNNER)


def test_a_bundle_of_a_folder_that_is_no_repository_has_no_git_files(project: Path, tmp_path: Path) -> None:
    (project / "a.py").write_text("1\n")
    (run := begun(tmp_path / "run")).folder.config.write_text("a: 1\n")
    (tmp_path / "scratch").mkdir()
    _export(run, tmp_path / "bundle.tar.gz", tmp_path / "scratch")
    with tarfile.open(tmp_path / "scratch" / "bundle" / "code.tar.gz") as tar:
        names = tar.getnames()
    assert "project/a.py" in names and not any(".git" in name.split("/") for name in names)


def test_a_run_that_is_only_queued_is_not_called_done(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "a.py").write_text("1\n")
    run = begun(tmp_path / "run")
    a_run(run.root)
    monkeypatch.setattr("ddp_train.cli.reproduce.run_command", lambda *_, **__: (0, {}))
    monkeypatch.chdir(tmp_path)
    assert _run_again(run, "run", [], []) == 1
    assert [ArchivedRun(path.parent).reproduces for path in Path("outputs").rglob("notes.json")] == ["run"]
    assert "not compared, as it is not done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "code", "verdict"), [(0.5, 0, "the same losses bit for bit: 1 "), (0.6, 1, "the losses differ from step 7 on")]
)
def test_the_last_line_is_the_verdict(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: float, code: int, verdict: str
) -> None:
    (project / "a.py").write_text("1\n")
    run = begun(tmp_path / "run")
    a_run(run.root)
    record = {"split": "train", "step": 7, "loss": 0.5}
    run.folder.metrics.write_text(json.dumps(record))

    def train(command: list[str], **how: object) -> tuple[int, dict[str, str]]:
        new = RunFolder(Path(command[-1]))
        new.environment.write_text(json.dumps({**run.environment, "packages": {"numpy": "9"}}))
        new.metrics.write_text(json.dumps({**record, "loss": loss}))
        Result(status=Status.COMPLETED, step=7).write(new.result)
        return 0, {}

    monkeypatch.setattr("ddp_train.cli.reproduce.run_command", train)
    monkeypatch.chdir(tmp_path)
    assert _run_again(run, "run", [], []) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith(verdict) and "differed in this run:" in shown


def test_a_check_reads_the_kept_code(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "a.py").write_text("1\n")
    run = begun(tmp_path / "run")
    a_run(run.root)
    run.folder.environment.write_text(json.dumps(run.environment))
    reproduce([str(run.root), "--check"], RUNNER)
    shown = capsys.readouterr().out
    assert "code.tar.gz" not in shown and "it would train in outputs/" in shown
    whole = run.folder.code_archive.read_bytes()
    for damage in (whole[: len(whole) // 2], b"cut"):
        run.folder.code_archive.write_bytes(damage)
        assert reproduce([str(run.root), "--check"], RUNNER) == 1 and "code.tar.gz is not used" in capsys.readouterr().out
    run.folder.code_archive.unlink()
    assert reproduce([str(run.root), "--check"], RUNNER) == 1 and "No such file" in capsys.readouterr().out
