"""Where a run is, in words, and what it has said."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from ddp_train.cli import main
from ddp_train.cli import status as module
from ddp_train.cli.status import show_logs, show_status
from ddp_train.errors import DataError, EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Stage, State, Submission
from ddp_train.launch.job import Evaluation
from ddp_train.run_folder import failure
from ddp_train.run_folder.progress import batch_notes
from ddp_train.run_folder.result import Result, Status
from tests.fake_runner import FakeRunner
from tests.unit.cli.runs import a_run, works_in

RUNNER = FakeRunner(lambda job: 99)


def status(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert show_status([str(root)], RUNNER) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{root}: ")
    return [first.removeprefix(f"{root}: "), *(line.strip() for line in rest)]


def test_a_run_from_its_start_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    Submission(engine="slurm", id="17").write(run_folder)
    found = State(stage=Stage.QUEUED, why="Resources")
    monkeypatch.setattr(slurm_client, "state", lambda id: found)
    assert status(tmp_path, capsys) == ["queued (Resources), job 17"]
    found = State(stage=Stage.RUNNING, nodes=("node1", "node2"))
    run_folder.metrics.write_text(
        '{"split": "train", "step": 40, "loss": 0.5, "step_ms": 500, "epoch": 1.5}\n{"split": "eval", "step": 40}\n{"spl'
    )
    assert status(tmp_path, capsys) == [
        "running on node1, node2, job 17",
        "step 40 of 100, epoch 1.50 of 6, loss 0.5, 2 steps/s, 30 s left",
    ]
    found = State(stage=Stage.ENDED, why="out_of_memory", nodes=("node1",))
    assert status(tmp_path, capsys)[0].startswith("not running; again: the run ended without writing result.json")
    assert status(tmp_path, capsys)[1:3] == ["job 17 ended on node1: out_of_memory", "step 40 of 100, epoch 1.50 of 6, loss 0.5, 2 steps/s"]
    Result(status=Status.COMPLETED, step=100, metrics={"last": {"eval/loss": 0.25}}).write(run_folder.result)
    assert status(tmp_path, capsys)[0] == "done" and status(tmp_path, capsys)[-1] == "eval/loss 0.25"


def test_a_program_gets_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    run_folder.metrics.write_text('{"split": "train", "step": 40, "loss": null}\n')
    assert show_status([str(tmp_path), "--json"], RUNNER) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["outcome"], facts["exit_code"], facts["result"]) == (str(tmp_path), "again", 75, None)
    assert facts["record"] == {"split": "train", "step": 40, "loss": None}
    Result(status=Status.COMPLETED, step=100, metrics={"last": {"eval/loss": 0.25}}).write(run_folder.result)
    assert show_status(["--json", str(tmp_path)], RUNNER) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["outcome"], facts["result"]["metrics"]["last"]) == ("done", "done", {"eval/loss": 0.25})


def test_what_went_wrong_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = a_run(tmp_path)
    failure.from_exception(DataError(happened="train-images is missing"), rank=3, step=None).record(run_folder)
    first = status(tmp_path, capsys)[0]
    assert first.startswith("not running; never: rank 3 on ") and "train-images is missing" in first

    def away(id: str) -> State:
        raise EnvironmentRefuses(happened="SLURM does not answer: no controller")

    Submission(engine="slurm", id="17").write(run_folder)
    monkeypatch.setattr(slurm_client, "state", away)
    first, second = status(tmp_path, capsys)[:2]
    assert first.startswith("not known whether it runs; ")
    assert second == "slurm, job 17: SLURM does not answer: no controller"


def test_a_run_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    with works_in(run_folder) as process:
        assert status(tmp_path, capsys)[0].startswith(f"running (pid {process.pid} on ")
        process.terminate()


def test_of_an_evaluation_its_batches_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    Evaluation(run="there", checkpoint="there/checkpoints/last").write(run_folder)
    run_folder.metrics.write_text('{"split": "train", "step": 7}\n')
    batch_notes(run_folder, step=7, num_batches=12)()
    assert status(tmp_path, capsys)[1:] == ["checkpoint of step 7, batch 0 of 12"]
    Result(status=Status.COMPLETED, step=7, metrics={"last": {"eval/loss": 0.25}}).write(run_folder.result)
    assert status(tmp_path, capsys) == ["done", "eval/loss 0.25"]


def test_a_cut_off_file_of_a_run_is_named_and_is_no_mistake_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = a_run(tmp_path / "run")
    run_folder.result.write_text('{"status": "comp')
    monkeypatch.setattr(sys, "argv", ["ddp-train", "status", str(run_folder.root)])
    assert main.run(sys.argv[1:], RUNNER) == 0
    shown = capsys.readouterr().out
    assert "not running; again: the run ended without writing result.json" in shown
    assert f"{run_folder.result} is damaged and ignored" in shown
    run_folder.submitted.parent.mkdir()
    run_folder.submitted.write_text('{"engine": "sl')
    assert main.run(sys.argv[1:], RUNNER) == 2
    assert f"{run_folder.submitted} cannot be read: Unterminated string" in capsys.readouterr().err


def test_the_end_of_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = a_run(tmp_path)
    run_folder.rank_log(0).write_text("".join(f"line {number}\n" for number in range(5000)))
    assert show_logs([str(tmp_path)], RUNNER) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "line 4999" and 100 < len(lines) < 5000


def test_it_goes_on_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    run_folder = a_run(tmp_path)
    run_folder.rank_log(0).write_text("first\n")
    with works_in(run_folder) as process:
        follower = threading.Thread(target=show_logs, args=(["-f", str(tmp_path)], RUNNER))
        follower.start()
        time.sleep(0.3)
        assert follower.is_alive()
        with run_folder.rank_log(0).open("a") as file:
            file.write("second\n")
        process.terminate()
        follower.join(timeout=10)
    assert not follower.is_alive()
    assert capsys.readouterr().out.splitlines() == ["first", "second"]
