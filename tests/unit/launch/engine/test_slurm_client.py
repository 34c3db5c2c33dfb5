"""What SLURM's commands answer, read the same from every version."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import NoAnswer, Stage


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose scripts are the commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_HET_SIZE", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def answer(folder: Path, command: str, *, out: str = "", err: str = "", code: int = 0) -> None:
    (folder / f"{command}.out").write_text(out)
    script = folder / command
    script.write_text(f"#!/bin/bash\necho \"$@\" >> {folder}/{command}.calls\ncat {folder}/{command}.out\necho '{err}' >&2\nexit {code}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("line", "stage", "why", "nodes"),
    [
        ("PENDING|Resources||2026-01-02T03:04:05|2026-01-02T04:04:05", Stage.QUEUED, "Resources", ()),
        ("PENDING|BeginTime||N/A|N/A", Stage.QUEUED, "BeginTime", ()),
        ("RUNNING|None|node[1-2]|2026-01-02T03:04:05|2026-01-02T04:04:05", Stage.RUNNING, "", ("node1", "node2")),
        ("COMPLETING|None|node1|2026-01-02T03:04:05|2026-01-02T03:05:05", Stage.RUNNING, "completing", ("node1",)),
        ("TIMEOUT|TimeLimit|node1|2026-01-02T03:04:05|2026-01-02T04:04:05", Stage.ENDED, "timeout", ("node1",)),
        ("NODE_FAIL|None|node1|2026-01-02T03:04:05|2026-01-02T04:04:05", Stage.ENDED, "node_fail", ("node1",)),
    ],
)
def test_the_state_of_a_job(answers: Path, line: str, stage: Stage, why: str, nodes: tuple[str, ...]) -> None:
    answer(answers, "squeue", out=f"7|{line}\n")
    found = slurm_client.state("7")
    assert (found.stage, found.why, found.nodes) == (stage, why, nodes)
    began = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    assert found.since == (None if stage is Stage.QUEUED else began)
    assert (found.ends is not None) == (stage is Stage.RUNNING)


def test_a_submission_that_was_not_answered_is_looked_for(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_client, "_ASKS_EVERY_S", 0.0)
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    answer(answers, "sbatch", err=lost, code=1)
    command = ["sbatch", "--parsable", "/runs/a b/launch/slurm.sbatch"]
    answer(answers, "squeue", out="16|/runs/other/launch/slurm.sbatch\n17|/runs/a b/launch/slurm.sbatch\n")
    assert slurm_client.submit(command) == "17"
    answer(answers, "squeue", out="16|/runs/other/launch/slurm.sbatch\n")
    with pytest.raises(EnvironmentRefuses, match=r"SLURM did not accept the job: .*timed out"):
        slurm_client.submit(command)
    answer(answers, "squeue", err="Unable to contact slurm controller", code=1)
    with pytest.raises(NoAnswer, match="SLURM does not answer"):
        slurm_client.submit(command)


def test_of_an_array_what_is_still_to_be_expected_counts(answers: Path) -> None:
    answer(answers, "squeue", out="7_0|COMPLETED|None|a|N/A|N/A\n7_1|RUNNING|None|b|N/A|N/A\n7_2|PENDING|Priority||N/A|N/A\n")
    assert slurm_client.state("7").nodes == ("b",)
    assert "--jobs=7" in (answers / "squeue.calls").read_text()


def test_a_job_that_is_forgotten_has_ended_and_a_controller_that_is_away_says_nothing(answers: Path) -> None:
    answer(answers, "squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert slurm_client.state("7").stage is Stage.ENDED
    answer(answers, "squeue", err="Unable to contact slurm controller", code=1)
    with pytest.raises(EnvironmentRefuses, match="Unable to contact"):
        slurm_client.state("7")


def test_an_array_is_asked_once_for_all_its_tasks(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(answers, "squeue", out="8_0|COMPLETED|None|a|N/A|N/A\n8_1|RUNNING|None|b|N/A|N/A\n8_12|PENDING|JobArrayTaskLimit||N/A|N/A\n")
    monkeypatch.setattr(slurm_client.time, "monotonic", lambda: 100.5)
    stages = [slurm_client.state(f"8_{task}").stage for task in (0, 1, 12, 2)]
    assert stages == [Stage.ENDED, Stage.RUNNING, Stage.QUEUED, Stage.ENDED]
    assert len((answers / "squeue.calls").read_text().splitlines()) == 1
    monkeypatch.setattr(slurm_client.time, "monotonic", lambda: 102.0)
    answer(answers, "squeue", err="Unable to contact slurm controller", code=1)
    with pytest.raises(EnvironmentRefuses):
        slurm_client.state("8_1")


@pytest.mark.parametrize(("said", "tasks"), [("MaxArraySize            = 11", 11), ("", 1001)])
def test_how_many_tasks_an_array_may_have(answers: Path, said: str, tasks: int) -> None:
    answer(answers, "scontrol", out=f"Configuration data\nMaxArraySize2 = 5\n{said}\n")
    assert slurm_client.most_tasks() == tasks


def test_what_sbatch_says_is_shown(answers: Path) -> None:
    answer(answers, "sbatch", out="17;cluster\n")
    assert slurm_client.submit(["sbatch", "--parsable", "x"]) == "17"
    answer(answers, "sbatch", err="sbatch: error: invalid partition specified: x", code=1)
    with pytest.raises(ConfigError, match="invalid partition specified"):
        slurm_client.submit(["sbatch", "--parsable", "x"])
    answer(answers, "sbatch", err="sbatch: error: QOSMaxSubmitJobPerUserLimit", code=1)
    with pytest.raises(EnvironmentRefuses, match="accepts no jobs now"):
        slurm_client.submit(["sbatch", "--parsable", "x"])


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on this machine"):
        slurm_client.submit(["sbatch"])


def test_where_this_process_stands(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_client.allocation() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert slurm_client.allocation() == "7"
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(ConfigError, match="heterogeneous"):
        slurm_client.allocation()
    monkeypatch.delenv("SLURM_HET_SIZE")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node1")
    with pytest.raises(ConfigError, match="task of srun"):
        slurm_client.allocation()


def test_a_step_is_found_by_its_name(answers: Path) -> None:
    answer(answers, "squeue", out="7.0|other\n7.3|mine|x\n7.4|mine\n")
    assert slurm_client.step_named("7", "mine") == "7.4"
    assert slurm_client.step_named("7", "none") is None
