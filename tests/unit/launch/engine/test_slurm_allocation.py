"""A run inside an allocation: one step, whose end and whose signals are ours."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm_allocation
from ddp_train.launch.spec import Spec
from tests.unit.launch.engine.specs import spec


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
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    return folder


def inside(tmp_path: Path, *overrides: str) -> Spec:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    return spec(run, *overrides)


def test_it_is_one_step_on_the_machines_of_the_allocation(commands: Path, tmp_path: Path) -> None:
    one = inside(tmp_path, "cluster.nodes=2")
    assert slurm_allocation.run(one, "7") == 0
    words = (commands / "called").read_text().splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--kill-on-bad-exit=1"} <= set(words)
    assert words[-4:] == ["bash", f"{tmp_path}/run/launch/task.sh", "node", f"{tmp_path}/run/launch/spec.json"]
    assert (commands / "environment").read_text().startswith("SLURM_JOB_END_TIME=18934")


def test_an_allocation_that_is_too_small_is_told(commands: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 4, and the allocation \(job 7\) has 3"):
        slurm_allocation.run(inside(tmp_path, "cluster.nodes=4"), "7")


def test_ctrl_c_is_passed_on_to_the_step(commands: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (commands / "waits").touch()
    one = inside(tmp_path)

    def interrupt() -> None:
        while not (commands / "step").exists():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert slurm_allocation.run(one, "7") == 130
    thread.join()
    assert (commands / "signalled").read_text().split() == [f"--signal={signal.SIGINT:d}", "7.0"]
    assert "stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize(("status", "code", "expected"), [("failed", 1, 1), ("preempted", 78, 78), ("preempted", 127, 78)])
def test_it_ends_as_the_run_did_and_as_a_machine_that_refused(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int, expected: int
) -> None:
    monkeypatch.setenv("status", status)
    (commands / "code").write_text(str(code))
    one = inside(tmp_path)
    assert slurm_allocation.run(one, "7") == expected
    assert one.job.run_folder.starts.exists()
