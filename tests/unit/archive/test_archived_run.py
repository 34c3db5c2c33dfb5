"""A run is read from its folder, whatever state that is in."""

from __future__ import annotations

import json
from pathlib import Path

from ddp_train.archive.archived_run import BROKEN, ArchivedRun
from ddp_train.run_folder.result import Result, Status
from tests.unit.cli.runs import a_run, works_in


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run_folder = a_run(tmp_path)
    run_folder.logs.rmdir()
    run = ArchivedRun(tmp_path)
    assert (run.status, run.step, run.metrics, run.problems) == (Status.QUEUED, None, [], [])
    assert run.config["trainer"]["max_steps"] == 100
    run_folder.environment.write_text(json.dumps({"overrides": ["trainer.max_steps=100"]}))
    rows = [{"split": "train", "step": step, "loss": loss} for step, loss in ((10, 2.0), (20, 1.0), (30, None), (40, 1.5))]
    run_folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"split": "tr')
    process = works_in(run_folder)
    assert ArchivedRun(tmp_path).status == Status.RUNNING
    process.terminate()
    process.wait()
    run = ArchivedRun(tmp_path)
    assert (run.status, run.step, run.overrides) == (Status.INTERRUPTED, 40, ["trainer.max_steps=100"])
    assert run.last == {"train/loss": 1.5} and run.best == {"train/loss": {"value": 1.0, "step": 20}}
    assert run.curve("train/loss") == [(10, 2.0), (20, 1.0), (30, None), (40, 1.5)]
    Result(status=Status.FAILED).write(run_folder.result)  # by its agent, after SIGKILL
    assert ArchivedRun(tmp_path).step == 40
    best = {"eval/loss": {"value": 0.25, "step": 50}}
    Result(
        status=Status.COMPLETED,
        step=100,
        metrics={"last": {"eval/loss": 0.5}, "best": best},
        headline={"metric": "eval/loss", "goal": "min"},
    ).write(run_folder.result)
    run = ArchivedRun(tmp_path)
    assert (run.status, run.step, run.last, run.best) == (Status.COMPLETED, 100, {"eval/loss": 0.5}, best)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    run_folder = a_run(tmp_path)
    text = run_folder.config.read_text()
    for name, content, why in (
        ("result.json", '{"status": "comp', "result.json cannot be read: "),
        ("result.json", '{"status": "settled"}', "result.json has no status that this version knows"),
        (
            "result.json",
            '{"status": "completed", "headline": 3}',
            "result.json has no status that this version knows, or is of another form",
        ),
        (
            "result.json",
            '{"status": "completed", "metrics": [1]}',
            "result.json has no status that this version knows, or is of another form",
        ),
        ("result.json", "[]", "result.json holds no JSON object"),
        ("environment.json", "{", "environment.json cannot be read: "),
        ("notes.json", "nothing", "notes.json cannot be read: "),
        ("config.yaml", "a: [", "config.yaml cannot be read: "),
        ("config.yaml", "- a", "config.yaml holds no configuration"),
        ("config.yaml", text.replace("\ntrainer:", "\ntraining:"), "config.yaml has no section trainer: another version of ddp_train"),
    ):
        (tmp_path / name).write_text(content)
        run = ArchivedRun(tmp_path)
        assert run.status == BROKEN
        assert [problem for problem in run.problems if problem.startswith(why)], run.problems
        (tmp_path / name).unlink()
        run_folder.config.write_text(text)
    run_folder.config.unlink()
    assert ArchivedRun(tmp_path).problems == ["config.yaml is missing"]
