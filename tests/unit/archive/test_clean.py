"""What is kept is said; nothing is removed that is in use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_train.archive.clean import Removal, carry_out, kept, removals
from ddp_train.archive.index import Index
from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep
from tests.unit.archive.finished import a_sweep, finished, saved
from tests.unit.cli.runs import works_in


def removable(root: Path, *rules: str, only_checkpoints: bool = False) -> dict[str, str]:
    """Return the names of runs that can be removed or are used, each with that of a run that uses it."""
    found = removals(Index(root), where="", rules=rules, only_checkpoints=only_checkpoints)
    used_by = {str(removal.run.relative_to(root)): removal.stays.removesuffix(" uses it") for removal in found}
    return {run: user and os.path.relpath(user, root) for run, user in used_by.items() if not user or Path(user).is_dir()}


def found_in(root: Path, *rules: str, only_checkpoints: bool = False) -> list[Removal]:
    found = removals(Index(root), where="", rules=rules, only_checkpoints=only_checkpoints)
    return [removal for removal in found if not removal.stays]


def test_rules_keep_runs_of_each_name(tmp_path: Path) -> None:
    for number in range(4):
        finished(tmp_path / f"a{number}", 0.1 * number, "name=a", started=10 - number)
        finished(tmp_path / f"b{number}", 0.1 * number, "name=b", started=number)
    (tmp_path / "b1/notes.json").write_text(json.dumps({"tags": ["paper"]}))
    for repeated in (finished(tmp_path / "a9", 0.9, "name=a", started=0), finished(tmp_path / "b9", 0.9, "name=b", started=0)):
        (repeated.root / "notes.json").write_text(json.dumps({"reproduces": "a3"}))  # no result of its own
    index = Index(tmp_path)
    for rules, names in (
        (["best=1"], {"a3", "b3"}),
        (["last=2"], {"a0", "a1", "b3", "b2"}),
        (["tagged", "where=name = 'a' AND best > 0.15 AND reproduces IS NULL"], {"b1", "a2", "a3"}),
    ):
        assert kept(index, rules).keys() == {str(tmp_path / name) for name in names}
    assert removable(tmp_path, "best=1", "last=2", "tagged") == {"a2": "", "b0": "", "a9": "", "b9": ""}
    for rule in ("best", "best=x", "tagged=1", "where", "newest=2"):
        if rule != "tagged=1":
            with pytest.raises(ConfigError, match="--keep="):
                kept(index, [rule])


def test_a_run_that_somebody_works_on_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its lock, by that of its sweep, by its engine's queue; and where the engine does not answer."""
    for name in ("free", "locked", "queued"):
        finished(tmp_path / name, 0.5)
    sweep = a_sweep(tmp_path / "s", "0.1", "0.2")
    queued = RunFolder(tmp_path / "queued")
    queued.result.unlink()
    Submission(engine="slurm", id="17").write(queued)
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.QUEUED))
    works = [works_in(RunFolder(tmp_path / "locked")), works_in(RunFolder(sweep.root))]
    assert removable(tmp_path) == {"free": ""}
    for process in works:
        process.terminate()
        process.wait()
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=Stage.ENDED))
    assert set(removable(tmp_path)) == {"free", "locked", "queued", "s/0", "s/1"}


def test_each_run_that_stays_has_a_reason(tmp_path: Path) -> None:
    for number, name in enumerate(("worst", "middle", "best", "tagged")):
        finished(tmp_path / name, 0.1 * number, f"name={'b' if name == 'tagged' else 'a'}")
    (tmp_path / "tagged/notes.json").write_text(json.dumps({"tags": ["paper"]}))
    finished(tmp_path / "project", 0.0, "name=a")
    (tmp_path / "project/.git").mkdir()
    sweep = a_sweep(tmp_path / "s", "0.1")
    works = [works_in(RunFolder(tmp_path / "middle")), works_in(RunFolder(sweep.root))]
    found = removals(Index(tmp_path), where="", rules=["where=name='a' AND best > 0.15", "tagged"], only_checkpoints=False)
    assert {str(removal.run.relative_to(tmp_path)): removal.stays for removal in found} == {
        "worst": "",
        "middle": "it is running",
        "best": "--keep=where=name='a' AND best > 0.15",
        "tagged": "--keep=tagged",
        "project": "you are in it, or it holds more than a run",
        "s/0": "its sweep is running",
    }
    for process in works:
        process.terminate()
        process.wait()


def test_what_another_run_points_to_is_said(tmp_path: Path) -> None:
    teacher = finished(tmp_path / "teacher", 0.5)
    checkpoint = saved(teacher)
    finished(tmp_path / "pupil", 0.6, "init_from=teacher/checkpoints/best", "name=pupil")
    finished(tmp_path / "other", 0.6, f"init_from={checkpoint}", "name=other")
    assert removable(tmp_path, "where=name IN ('pupil', 'other')") == {"teacher": "other"}
    assert removable(tmp_path, "where=name IN ('pupil', 'other')", only_checkpoints=True) == {"teacher": "other"}
    assert removable(tmp_path) == {"teacher": "", "pupil": "", "other": ""}  # they go as well


def test_runs_and_checkpoints_go_and_a_sweep_forgets_its_jobs(tmp_path: Path) -> None:
    alone = finished(tmp_path / "alone", 0.5)
    saved(alone)
    sweep = a_sweep(tmp_path / "s", "0.1", "0.2", "0.3")
    found = found_in(tmp_path, only_checkpoints=True)
    assert [removal.path for removal in found] == [alone.checkpoints]
    assert carry_out(found) == [] and not alone.checkpoints.exists() and alone.is_completed()
    assert carry_out(found_in(tmp_path, "best=1")) == []
    assert [job.number for job in Sweep.load(sweep.root).jobs] == [2] and not (sweep.root / "0").exists()
    assert [row["folder"] for row in Index(tmp_path).rows()] == [str(sweep.root / "2")]
    found = found_in(tmp_path)
    process = works_in(RunFolder(sweep.root / "2"))  # it began after it was listed
    (failed,) = carry_out(found)
    assert "another run is working in" in failed and RunFolder(sweep.root / "2").is_completed()
    process.terminate()
    process.wait()
    assert carry_out(found) == [] and not sweep.root.exists()


def test_what_is_not_surely_one_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with config.yaml and logs, a checkout, the given folder, the one in which the user stands, a folder of other runs."""
    (tmp_path / "project/logs").mkdir(parents=True)
    (tmp_path / "project/config.yaml").write_text("a: 1\n")
    for name in ("checkout", "here", "outer", "free"):
        finished(tmp_path / name, 0.5)
    (tmp_path / "checkout/.git").mkdir()
    (tmp_path / "here/below").mkdir()
    finished(tmp_path / "outer/inner", 0.5)
    monkeypatch.chdir(tmp_path / "here/below")
    assert removable(tmp_path) == {"free": ""} and removable(tmp_path / "free") == {} and removable(tmp_path / "project") == {}


def test_users_are_found_under_any_key_and_in_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        finished(tmp_path / "outputs/pretrain" / name, 0.5, f"name={name}")
    pointers = {"a": "teacher: {weights: [outputs/pretrain/b/checkpoints/best]}", "b": "after: [outputs/pretrain/c, outputs/x]"}
    for name, text in pointers.items():
        config = tmp_path / "outputs/pretrain" / name / "config.yaml"
        key = text.partition(":")[0]
        config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith(f"{key}:")) + f"{text}\n")
    assert removable(tmp_path / "outputs/pretrain", "where=name IN ('a', 'b')") == {"c": "b", "d": ""}
    assert removable(tmp_path / "outputs/pretrain", "where=name = 'a'") == {"b": "a", "c": "", "d": ""}


def test_what_has_begun_since_it_was_listed_stays(tmp_path: Path) -> None:
    """A sweep whose folder is held by `resume` of a job, and an evaluation of a run."""
    sweep = a_sweep(tmp_path / "s", "0.1")
    run = finished(tmp_path / "r", 0.5)
    evaluation = RunFolder(run.evaluations / "e")
    evaluation.root.mkdir(parents=True)
    found = found_in(tmp_path)
    works = [works_in(evaluation), works_in(RunFolder(sweep.root))]
    assert len(found) == len(carry_out(found)) == 2
    assert run.is_completed() and evaluation.root.exists() and (sweep.root / "0").exists()
    for process in works:
        process.terminate()
        process.wait()


def test_of_a_sweep_without_jobs_its_own_files_go_and_no_others(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path / "s", "0.1")
    (sweep.root / "conf").mkdir()
    kept_run = finished(sweep.root / "mine", 0.5, "name=mine")
    assert carry_out(found_in(tmp_path, "where=name = 'mine'")) == []
    assert [path.name for path in sweep.root.iterdir()] == ["mine"] and kept_run.is_completed()
