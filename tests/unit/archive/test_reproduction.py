"""A run's code comes back as it was, what differs here has a name, and two curves are compared to the bit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.reproduction import (
    changed_code,
    code_of,
    compare_losses,
    differences,
    install_line,
    missing_commits,
    restore_code,
    this_machine,
)
from ddp_train.errors import ConfigError, DataError
from ddp_train.launch.captured_code import capture_code
from tests.unit.launch.test_captured_code import commit, git, project

__all__ = ["project"]


def run_with(folder: Path, **environment: Any) -> ArchivedRun:
    run = ArchivedRun(folder)
    run.environment = environment
    return run


def begun(folder: Path) -> ArchivedRun:
    """Return a run that has begun in the current folder."""
    run = ArchivedRun(folder)
    code = [asdict(each) for each in capture_code(run.folder.code_archive, run.folder.spec)]
    run.environment = json.loads(json.dumps({"code": code, "working_directory": os.getcwd()}))
    return run


def tree(folder: Path) -> dict[str, Any]:
    files = [path for path in sorted(folder.rglob("*")) if ".git" not in path.parts and (path.is_symlink() or path.is_file())]
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else (path.read_bytes(), path.stat().st_mode & 0o100)
        for path in files
    }


def test_the_code_comes_back_as_it_was(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sub").mkdir()
    commit(project, a="1\n", b="2\n", c="3\n", d="4\n")
    (project / "a.py").write_bytes(bytes(range(255, -1, -1)))  # without 12345678, which was a secret of another test
    (project / "b.py").unlink()
    (project / "c.py").chmod(0o755)
    (project / "d.py").unlink()
    (project / "d.py").mkdir()
    (project / "d.py" / "inner.py").write_text("5\n")
    (project / "inside").symlink_to("c.py")
    before = tree(project)
    monkeypatch.chdir(project / "sub")
    run = begun(tmp_path / "run")
    monkeypatch.chdir(project)
    git(project, "checkout", "-qf", "HEAD")
    git(project, "clean", "-qfd")
    (project / "a.py").write_text("later\n")
    git(project, "commit", "-qam", "later")
    here, python_path = restore_code(run, tmp_path / "into")
    assert tree(tmp_path / "into" / "project") == before
    assert here == tmp_path / "into" / "project" / "sub" and str(tmp_path / "into" / "project") in python_path
    assert [*changed_code(code_of(run)[:1])] == [] and git(project, "status", "--porcelain") == ""


def test_a_commit_that_is_gone_is_named_with_the_command_that_fetches_it(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    git(project, "remote", "add", "origin", "https://x.org/a")
    run = begun(tmp_path / "run")
    run.environment["code"][0]["commit"] = "1" * 40
    assert "git fetch https://x.org/a 1111" in missing_commits(code_of(run))[0]
    with pytest.raises(ConfigError, match="in no repository here"):
        restore_code(run, tmp_path / "into")


def test_names_in_a_forged_environment_lead_nowhere(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    (tmp_path / "precious.py").write_text("1\n")
    run = begun(tmp_path / "run")
    run.environment["code"][0]["deleted"] = ["../../precious.py"]
    with pytest.raises(ConfigError, match="leads out"):
        restore_code(run, tmp_path / "into")
    assert (tmp_path / "precious.py").exists()
    for key, value in {"name": "../x", "commit": "--upload-pack=x", "unknown": 1}.items():
        forged = run_with(tmp_path, code=[{**run.environment["code"][0], key: value}], working_directory="/")
        with pytest.raises(ConfigError, match="does not say which code"):
            code_of(forged)
    run.folder.code_archive.write_text("cut")
    with pytest.raises(DataError, match=r"code\.tar\.gz is not used"):
        restore_code(run, tmp_path / "other")


def test_what_differs_has_a_name_and_what_one_does_not_say_is_not_compared() -> None:
    ranks = [{"device": "cuda:0 (H100)", "threads": 4}, {"device": "cuda:1 (H100)", "threads": 4}]
    facts: dict[str, Any] = {"torch": "2.1", "packages": {"numpy": "1", "old": "3"}, "cpu": {"model": "A"}, "variables": {"MKL_CBWR": "X"}}
    run = run_with(Path("a"), **facts, ranks=ranks, world_size=2)
    changed = {"torch": "2.2", "packages": {"numpy": "2", "new": "1"}, "cpu": {"model": "B"}, "variables": {}}
    other = run_with(Path("b"), **changed, ranks=[{"device": "cpu"}])
    assert differences(run, run) == [] and set(differences(run, other)) == {
        *("GPU: cuda (H100) -> none", "torch: 2.1 -> 2.2", "package numpy: 1 -> 2", "package old: 3 -> absent", "package new: absent -> 1"),
        *("cpu model: A -> B", "variable MKL_CBWR: X -> absent"),
    }
    here = this_machine()
    assert differences(here, here) == [] and here.environment["python"] == sys.version.partition(" ")[0]


def test_the_line_installs_what_is_absent_or_of_another_version() -> None:
    sources = {"hub": "git+https://x.org/hub@abc", "mine": "editable file:///mine"}
    versions = {"torch": "2.1+cpu", "hub": "1", "mine": "1", "same": "1"}
    run, other = (
        run_with(Path("a"), packages=versions, package_sources=sources),
        run_with(Path("b"), packages={"torch": "2.2", "same": "1"}),
    )
    found = install_line(run, other)
    assert found == "uv pip install --extra-index-url https://download.pytorch.org/whl/cpu torch==2.1+cpu 'hub @ git+https://x.org/hub@abc'"
    assert install_line(run, run) == ""


def test_curves_are_compared_by_their_values_and_not_by_their_times(tmp_path: Path) -> None:
    def recorded(name: str, *losses: float | None) -> ArchivedRun:
        (tmp_path / name).mkdir()
        rows = [
            {"split": "train", "step": step, "time": hash(name), "step_ms": len(name), "loss": loss} for step, loss in enumerate(losses, 1)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return ArchivedRun(tmp_path / name)

    first = recorded("first", 2.0, None, 1.0)
    assert compare_losses(first, recorded("again", 2.0, None)) == (True, "the same losses bit for bit: 2 records up to step 2")
    is_same, text = compare_losses(first, recorded("other", 2.0, None, 1.5))
    assert not is_same and text == (
        "the losses differ from step 3 on: train/loss 1.0 -> 1.5; at most by 0.5 of the value (train/loss, step 3); 3 records up to step 3"
    )
    assert compare_losses(recorded("nan_alone", None), recorded("nan_again", None)) == (
        False,
        "not all could be compared: 1 record up to step 1; no finite train/loss is among them",
    )
    assert not compare_losses(first, recorded("none"))[0] and not compare_losses(first, recorded("nan", 2.0, 1.0))[0]


def test_what_one_run_alone_has_is_not_called_the_same(tmp_path: Path) -> None:
    def recorded(name: str, *rows: dict[str, Any]) -> ArchivedRun:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return ArchivedRun(tmp_path / name)

    train = [{"split": "train", "step": step, "loss": 1.0, "grad_norm": 2.0} for step in (1, 2, 3)]
    evaluated = {"split": "eval", "step": 2, "loss": 1.0}
    old = recorded("old", train[0], train[1], evaluated, train[2])
    assert compare_losses(old, recorded("same", train[0], train[1], evaluated))[0]
    is_same, text = compare_losses(old, recorded("no_eval", *train))
    assert not is_same and text.endswith("; the new run has no eval/loss of step 2") and "bit for bit" not in text
    no_norm = [{key: value for key, value in row.items() if key != "grad_norm"} for row in train]
    assert "the new run has no train/grad_norm of step 1" in compare_losses(old, recorded("no_norm", no_norm[0], *train[1:], evaluated))[1]
    assert "the old run has no eval/loss of step 2" in compare_losses(recorded("bare", *train), old)[1]
    assert compare_losses(recorded("killed", *train[:2]), recorded("ends_there", *train[:2], evaluated))[0]  # which evaluates at its end
