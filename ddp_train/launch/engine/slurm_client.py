"""SLURM's own commands: what they are asked, and what they answer, the same from 22.05 to 26.05 (their JSON is not).

`squeue --format` has no text of users in what is read here; `scontrol show job` has, in the same line.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache

from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.launch.engine.engine import NoAnswer, Stage, State
from ddp_train.system.process_env import hosts_of, slurm_step

_WITHIN_S = 60.0
_MAX_TASKS = 1001  # of an array, where SLURM does not say otherwise
_LATER = ("MaxSubmit", "job submit limit", "temporarily")  # what sbatch says when the same may be taken later
_NO_ANSWER = ("Unable to contact", "timed out", "Zero Bytes", "standby")  # and when the job may be in the queue
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_ASKS, _ASKS_EVERY_S = 6, 5.0  # for a job whose submission was not answered


def submit(arguments: Sequence[str]) -> str:
    """Submit a script, the last of the arguments, and return the job's id. EnvironmentRefuses: SLURM takes none now, or is silent."""
    try:
        sbatch = _run(arguments)
    except EnvironmentRefuses as error:
        return _in_queue(arguments[-1], said=error.happened)
    if sbatch.returncode == 0:
        return sbatch.stdout.strip().partition(";")[0]
    if any(word in sbatch.stderr for word in _NO_ANSWER):
        return _in_queue(arguments[-1], said=_said(sbatch))
    if any(word in sbatch.stderr for word in _LATER):
        raise EnvironmentRefuses(key="cluster.slurm", happened=f"SLURM accepts no jobs now: {_said(sbatch)}", fix="try again later")
    raise ConfigError(key="cluster.slurm", happened=f"SLURM rejects the job: {_said(sbatch)}", expected="what `sinfo` lists")


def _in_queue(script: str, *, said: str) -> str:
    """Return the job of a script whose submission was not answered. EnvironmentRefuses: SLURM has none, or cannot be asked (NoAnswer)."""
    for _ in range(_ASKS):
        squeue = _run(["squeue", "--me", "--noheader", "--format=%F|%o"])
        if squeue.returncode == 0:
            rows = [line.partition("|") for line in squeue.stdout.splitlines()]
            if jobs := [job for job, _, command in rows if command.strip() == script]:
                return max(jobs, key=int)
            raise EnvironmentRefuses(key="cluster.slurm", happened=f"SLURM did not accept the job: {said}", fix="try again in a minute")
        time.sleep(_ASKS_EVERY_S)
    fix = "run `squeue --me` later to see whether the job is queued; if a run is submitted twice, the second job ends at once"
    raise NoAnswer(key="cluster.slurm", happened=f"SLURM does not answer: {said}", fix=fix)


def state(id: str) -> State:
    """Return the state of a job, or of a task of an array (ARRAY_TASK). EnvironmentRefuses: SLURM cannot be asked now."""
    array, _, task = id.partition("_")
    states = _tasks(array, int(time.monotonic())) if task else _states(id)
    gone = State(stage=Stage.ENDED, why="SLURM no longer knows this job")
    if task or id in states:
        return states.get(id, gone)
    order = (Stage.RUNNING, Stage.QUEUED, Stage.ENDED)  # of an array: what is still to be expected
    return min(states.values(), key=lambda state: order.index(state.stage), default=gone)


def signal(id: str, name: str) -> None:
    """Send a signal to the steps of a job, not to its script. One that has no step now gets none."""
    _run(["scancel", f"--signal={name}", id])


def step_named(job: str, name: str) -> str | None:
    """Return the id of the step of a job that has a name; None while there is none."""
    lines = _run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j"]).stdout.splitlines()
    return next((line.partition("|")[0] for line in lines if line.partition("|")[2] == name), None)


def cancel(id: str) -> None:
    """Take a job out of the queue; one that runs gets TERM, and KILL after KillWait."""
    scancel = _run(["scancel", id])
    if scancel.returncode != 0 and "Invalid job id" not in scancel.stderr:
        raise EnvironmentRefuses(happened=f"scancel {id} failed: {_said(scancel)}", fix=f"scancel {id}")


def most_tasks() -> int:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    return max(1, int(match[1])) if match else _MAX_TASKS


def allocation() -> str | None:
    """Return the job in whose allocation this process stands (salloc, a batch script); None outside. Refuses what has several parts."""
    if (job := os.environ.get("SLURM_JOB_ID")) is None:
        return None
    if os.environ.get("SLURM_HET_SIZE"):
        happened = f"job {job} is heterogeneous (SLURM_HET_SIZE={os.environ['SLURM_HET_SIZE']})"
        raise ConfigError(key="cluster", happened=happened, fix="salloc without `:`, or cluster=slurm on the login node")
    if (step := slurm_step(os.environ)) is not None:
        happened = f"is slurm, but this command is already a task of srun (step {step.id})"
        raise ConfigError(key="cluster.launcher", happened=happened, fix="run it without srun, or with cluster=machines")
    return job


@lru_cache(maxsize=64)
def _tasks(array: str, _second: int) -> Mapping[str, State]:
    """Return the state of each task of an array. Asked once a second, however many tasks are asked for."""
    return _states(array)


def _states(id: str) -> dict[str, State]:
    """Return the states of a job, or of each task of an array, by their ids; {}: SLURM knows none."""
    squeue = _run(["squeue", "--noheader", "--array", "--states=all", f"--jobs={id}", "--format=%i|%T|%r|%N|%S|%e"])
    if squeue.returncode != 0 and "Invalid job id" not in squeue.stderr:
        raise EnvironmentRefuses(happened=f"SLURM does not answer: {_said(squeue)}", fix="try again in a minute; `scontrol ping`")
    return {task: _state(*facts) for task, *facts in (line.split("|") for line in squeue.stdout.splitlines() if line.count("|") == 5)}


def _state(name: str, reason: str, nodes: str, began: str, ends: str) -> State:
    hosts = tuple(hosts_of(nodes))
    if name in _QUEUED:
        return State(stage=Stage.QUEUED, why=reason if reason != "None" else "", nodes=hosts)
    how = name.lower() + (f" ({reason})" if reason.startswith("Dependency") else "")  # cancelled, because a run before it failed
    if name in _RUNNING:
        return State(stage=Stage.RUNNING, why=how if name != "RUNNING" else "", nodes=hosts, since=_time(began), ends=_time(ends))
    return State(stage=Stage.ENDED, why=how, nodes=hosts, since=_time(began))


def _time(text: str) -> float | None:
    with suppress(ValueError):  # N/A
        return time.mktime(datetime.fromisoformat(text).timetuple())
    return None


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(arguments[0]) is None:
        happened = f"is slurm, but {arguments[0]} is not on this machine"
        raise ConfigError(key="cluster.launcher", happened=happened, fix="cluster=local, or run it on the login node")
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(arguments, capture_output=True, text=True, errors="replace", env=environment, timeout=_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentRefuses(happened=f"{arguments[0]} did not answer within {_WITHIN_S:.0f} s", fix="scontrol ping") from None


def _said(command: subprocess.CompletedProcess[str]) -> str:
    return " ".join((command.stderr or command.stdout).split()) or f"exit code {command.returncode}"
