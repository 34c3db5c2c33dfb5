"""The engine: what it writes and calls, in which folders its ids are found, and what it says of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.config.cluster import ENGINES
from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm, slurm_client
from ddp_train.launch.engine.engine import Engine, Stage, State, Submission, engine_of, has_queue
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.conftest import wait_for
from tests.unit.launch.engine.specs import spec

ENGINE = slurm.ENGINE


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_a_module_of_its_name(name: str) -> None:
    assert type(engine_of(name)).__bases__ == (Engine,) and has_queue(name) == (name == "slurm") and not has_queue("local")


def test_rendering_writes_nothing(tmp_path: Path) -> None:
    rendered = ENGINE.render([spec(tmp_path / "run")])
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in rendered.files] == ["slurm.sbatch", "task.sh"]
    assert rendered.commands == [["sbatch", "--parsable", str(tmp_path / "run/launch/slurm.sbatch")]]


def test_each_run_of_an_array_knows_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_client, "submit", lambda arguments: "17")
    folders = [RunFolder(tmp_path / name) for name in ("0", "1", "2")]
    for folder in folders:
        folder.root.mkdir()
    rendered = ENGINE.render([spec(folder.root, parallel=2) for folder in folders])
    assert ENGINE.submit(rendered) == "17" and (tmp_path / "launch/slurm.sbatch").exists()
    submissions = [Submission.read(folder) for folder in folders]
    assert [each.id for each in submissions if each is not None] == ["17_0", "17_1", "17_2"]
    assert all((folder.launch / "task.sh").exists() and folder.logs.is_dir() for folder in folders)


def test_a_job_that_runs_is_let_save_and_one_that_waits_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stage = Stage.RUNNING
    monkeypatch.setattr(slurm_client, "state", lambda id: State(stage=stage))
    monkeypatch.setattr(slurm_client, "signal", lambda id, name: done.append(f"{name} to {id}"))
    monkeypatch.setattr(slurm_client, "cancel", lambda id: done.append(f"cancel {id}"))
    ENGINE.stop("7")
    ENGINE.stop("7", at_once=True)
    stage = Stage.QUEUED
    ENGINE.stop("7")
    assert done == ["USR1 to 7", "cancel 7", "cancel 7"]


def test_who_follows_sees_the_states_the_logs_and_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    log = run_folder.logs / "slurm-7.out"
    log.write_text("of an earlier life\n")
    states = iter(
        [
            State(stage=Stage.QUEUED, why="Resources"),
            State(stage=Stage.RUNNING, nodes=("a", "b")),
            State(stage=Stage.ENDED, why="completed"),
        ]
    )

    def state(id: str) -> State:
        found = next(states)
        if found.stage is Stage.RUNNING:
            log.write_text("of an earlier life\nstep 1\n")
        return found

    monkeypatch.setattr(slurm_client, "state", state)
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    Result(status=Status.COMPLETED).write(run_folder.result)
    assert ENGINE.follow(run_folder, "7") == 0
    said = capsys.readouterr()
    assert said.out == "step 1\n"
    assert said.err.splitlines() == ["job 7: queued (Resources)", "job 7: running on a, b", "job 7: ended: completed", "done"]


def test_ctrl_c_ends_the_command_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def state(id: str) -> State:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_client, "state", state)
    assert ENGINE.follow(RunFolder(tmp_path), "7") == 130
    assert f"job 7 continues; `ddp-train cancel {tmp_path}` makes it save and stop" in capsys.readouterr().err


def test_ctrl_c_between_the_submission_and_its_note_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(arguments: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "17"

    monkeypatch.setattr(slurm_client, "submit", submit)
    run_folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ENGINE.submit(ENGINE.render([spec(tmp_path)]))
    submission = Submission.read(run_folder)
    assert submission is not None and submission.id == "17"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose scripts are SLURM's commands: srun runs until somebody signals its step, or is done at once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "squeue": f'case "$*" in *--steps*) cat {folder}/step;; *) echo "7|RUNNING|None|a|N/A|2030-01-01T00:00:00";; esac',
        "scancel": f'echo "$@" > {folder}/signalled',
        "srun": f'printf "%s\\n" "$@" > {folder}/called; env | grep ^SLURM_JOB_END_TIME > {folder}/environment\n'
        f'name=$(grep ^--job-name {folder}/called); echo "7.0|${{name#*=}}" > {folder}/step\n'
        f"if [ -e {folder}/waits ]; then until [ -e {folder}/signalled ]; do sleep 0.05; done; status=interrupted; fi\n"
        f'echo "{{\\"status\\": \\"${{status:-completed}}\\"}}" > {tmp_path}/run/result.json\n'
        f"[ ! -e {folder}/code ] || exit $(cat {folder}/code)",
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    return folder


def run_in_job_7(one: Spec) -> int:
    allocation = ENGINE.allocation()
    assert allocation is not None and (allocation.id, allocation.starter) == ("7", "srun")
    return allocation.run(one)


def inside(tmp_path: Path, *overrides: str) -> Spec:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    return spec(run, *overrides)


def test_it_is_one_step_on_the_machines_of_the_allocation(commands: Path, tmp_path: Path) -> None:
    one = inside(tmp_path, "cluster.nodes=2")
    assert run_in_job_7(one) == 0
    words = (commands / "called").read_text().splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--kill-on-bad-exit=1"} <= set(words)
    assert words[-4:] == ["bash", f"{tmp_path}/run/launch/task.sh", "node", f"{tmp_path}/run/launch/spec.json"]
    assert (commands / "environment").read_text().startswith("SLURM_JOB_END_TIME=18934")


def test_an_allocation_that_is_too_small_is_told(commands: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 4, but the allocation \(job 7\) has 3"):
        run_in_job_7(inside(tmp_path, "cluster.nodes=4"))


@pytest.mark.parametrize("is_early", [False, True])
def test_ctrl_c_is_passed_on_to_the_step(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_early: bool
) -> None:
    (commands / "waits").touch()

    def interrupt() -> None:
        wait_for((commands / "step").exists)
        os.kill(os.getpid(), signal.SIGINT)

    class Srun(subprocess.Popen[bytes]):
        """Ctrl-C comes while it is started, or while it is waited for."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if is_early:
                interrupt()

        def wait(self, timeout: float | None = None) -> int:
            if not is_early:
                threading.Thread(target=interrupt).start()
            return super().wait(timeout)

    monkeypatch.setattr(slurm, "subprocess", SimpleNamespace(Popen=Srun, DEVNULL=subprocess.DEVNULL))
    assert run_in_job_7(inside(tmp_path)) == 130
    assert (commands / "signalled").read_text().split() == [f"--signal={signal.SIGINT:d}", "7.0"]
    assert "stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize(("status", "code", "expected"), [("failed", 1, 1), ("preempted", 78, 78), ("preempted", 127, 78)])
def test_it_ends_as_the_run_did_and_as_a_machine_that_refused(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int, expected: int
) -> None:
    monkeypatch.setenv("status", status)
    (commands / "code").write_text(str(code))
    one = inside(tmp_path)
    assert run_in_job_7(one) == expected
    assert one.job.run_folder.starts.exists()
