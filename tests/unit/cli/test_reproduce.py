"""`ddp-train reproduce` says what it changes, refuses what would be another run, and finds data where it lies."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.cli.reproduce import _changes, _paths, reproduce
from ddp_train.errors import ConfigError
from tests.fake_runner import FakeRunner
from tests.unit.cli.runs import a_run

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
    with pytest.raises(ConfigError, match="would change what the run computes"):
        _changes(run, ["optimizer.lr=1"])


def test_relative_paths_lie_where_the_run_was_started_or_here_unless_the_code_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    run.config = {"data": {"root": "data", "words_file": "words.txt", "other_path": "absent"}, "model": model, "resume": "a/b"}
    assert [*_paths(run, ["x=1"], code)] == [f"data.root={began}/data", f"model.folder={here}/weights"]
    assert "data.other_path: absent is not here; type data.other_path=PATH" in capsys.readouterr().out
    assert [*_paths(run, ["data.root=/y", "model.folder=z"], code)] == []


def test_what_cannot_be_reproduced_is_named(tmp_path: Path) -> None:
    a_run(tmp_path)
    with pytest.raises(ConfigError, match="it has not begun, or is an evaluation"):
        reproduce([str(tmp_path)], RUNNER)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ConfigError, match=r"environment\.json cannot be read"):
        reproduce([str(tmp_path)], RUNNER)
    (tmp_path / "environment.json").write_text(json.dumps({"git": {"commit": "abc"}}))
    with pytest.raises(ConfigError, match="does not say which code was used"):
        reproduce([str(tmp_path)], RUNNER)
    with tarfile.open(tmp_path / "bundle.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "config.yaml", "config.yaml")
    with pytest.raises(ConfigError, match="may come from another user"):
        reproduce([str(tmp_path / "bundle.tar.gz")], RUNNER)
