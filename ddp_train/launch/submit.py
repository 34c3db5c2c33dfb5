"""A job that was composed, checked and claimed goes to an engine: its code is copied, its spec frozen, its files rendered and submitted."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_train.config.cluster import processes_of_nodes
from ddp_train.config.values import node_range
from ddp_train.errors import DONE, ConfigError, EnvironmentRefuses, UserError
from ddp_train.job import Job
from ddp_train.launch import snapshot
from ddp_train.launch.agent_process import stop_fork_server
from ddp_train.launch.engine import slurm, slurm_client
from ddp_train.launch.engine.engine import Stage, Submission, engine_of
from ddp_train.launch.spec import Code, Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.system.files import tail
from ddp_train.system.folder_lock import release

_TAIL_BYTES = 20_000  # of metrics.jsonl


def run(job: Job) -> int:
    """Submit a job; return 0 when that is done, or with cluster.wait the exit code of the run. In an allocation it runs at once."""
    stop_fork_server()  # here: the machines of the job import for themselves
    name = job.config.cluster.launcher
    run_folder = job.run_folder
    try:
        allocation = slurm_client.allocation() if name == "slurm" else None
        spec = freeze(job, snapshot.take(run_folder.code, limit_mib=job.config.cluster.code_limit_mib))
        if allocation is not None and (before := spec.engine_options["after"]):
            happened = f"job {', '.join(before)} is not done, and allocation {allocation} would be held for nothing"
            fix = f"`ddp-train ... && ddp-train resume {shlex.quote(run_folder.shown())}`"
            raise ConfigError(key="after", happened=happened, expected="runs that are done", fix=fix)
        spec.write()
        release()  # the machines of the job take the folder
        if allocation is not None:
            return slurm.run_in_allocation(spec, allocation)
        engine = engine_of(name)
        rendered = engine.render([spec])
        _require_possible([job])
        id = engine.submit(rendered)
    except UserError as error:
        if job.record is None:
            raise
        what = "it is not known whether the job was submitted" if isinstance(error, slurm_client.NoAnswer) else "nothing was submitted"
        again = f"`ddp-train resume {shlex.quote(run_folder.shown())}` does it when that is mended"
        print(f"\n{error}\n{what}; {again}", file=sys.stderr)
        return error.exit_code
    shown = shlex.quote(run_folder.shown())
    print(f"{'submitted as job' if name == 'slurm' else 'started as'} {id}: {shown}")
    print(f"  ddp-train status {shown}   ddp-train logs -f {shown}   ddp-train cancel {shown}", flush=True)
    return engine.follow(run_folder, id) if job.config.cluster.wait else DONE


def submit_jobs(jobs: Sequence[Job], code: Code, *, parallel: int) -> str:
    """Submit jobs of a sweep to an engine, so many at a time, and return its id of them. Each folder says whether it was submitted."""
    stop_fork_server()  # as above
    cluster = jobs[0].config.cluster
    most = slurm_client.most_tasks() if len(jobs) > 1 and cluster.launcher == "slurm" else len(jobs)
    specs = [freeze(job, code, parallel=parallel, most_tasks=most) for job in jobs]
    engine = engine_of(cluster.launcher)
    rendered = engine.render(specs)
    for spec in specs:
        spec.write()
    _require_possible(jobs)
    return engine.submit(rendered)


def freeze(job: Job, code: Code | None, **options: int) -> Spec:
    """Return what an engine is given for a job."""
    cluster = job.config.cluster
    processes = processes_of_nodes(cluster)
    return Spec(
        job=job,
        engine=cluster.launcher,
        processes=processes,
        min_nodes=node_range(cluster.nodes or len(processes))[0],
        code=code,
        engine_options={"python": sys.executable, "step_s": _step_s(job.run_folder), "after": _jobs_before(job), **options},
    )


def _runs_before(job: Job) -> list[Path]:
    """Return the folders of the runs that have to be done first (`after`); [] for a run that has begun before."""
    return [] if job.run_folder.environment.exists() else job.config.runs_before()


def _jobs_before(job: Job) -> list[str]:
    """Return the engine's jobs that have to be done before this one begins."""
    found = []
    for folder in _runs_before(job):
        if verdict_of(RunFolder(folder)).outcome is Outcome.DONE:
            continue
        submission = Submission.read(RunFolder(folder))
        if submission is None or submission.engine != job.config.cluster.launcher:
            happened = f"{folder} is not done, and no job of {job.config.cluster.launcher}"
            raise ConfigError(key="after", happened=happened, expected="runs that are done, or submitted to the same engine")
        found.append(submission.id)
    return found


def _require_possible(jobs: Sequence[Job]) -> None:
    """Refuse jobs that would come after one that has ended, and is not done: SLURM would take them out at once."""
    for folder in dict.fromkeys(folder for job in jobs for folder in _runs_before(job)):
        submission = Submission.read(RunFolder(folder))
        if submission is None or verdict_of(RunFolder(folder)).outcome is Outcome.DONE:
            continue
        if (state := engine_of(submission.engine).state(submission.id)).stage is Stage.ENDED:
            happened = f"{folder} is not done, and its job {submission.id} has ended{state.why and f' ({state.why})'}"
            raise ConfigError(key="after", happened=happened, fix=f"`ddp-train resume {shlex.quote(RunFolder(folder).shown())}` first")


def require_ended(folder: Path) -> None:
    """Refuse to start a run again that an engine has still: queued, or running."""
    run_folder = RunFolder(folder)
    submission = Submission.read(run_folder)
    if submission is None:
        return
    try:
        state = submission.state(run_folder)
    except EnvironmentRefuses as error:
        raise ConfigError(key="resume", happened=f"nobody knows whether {folder} runs: {error.happened}", fix=error.fix) from None
    if state.stage is not Stage.ENDED:
        fix = f"`ddp-train cancel {shlex.quote(run_folder.shown())}` first; a stopped run is requeued by itself"
        raise ConfigError(
            key="resume", happened=f"{folder} is {state.stage} as job {submission.id}", expected="a run that has ended", fix=fix
        )


def _step_s(run_folder: RunFolder) -> float:
    """Return how long the newest steps of a run took, in seconds; 0 for a new one."""
    found = 0.0
    for line in tail(run_folder.metrics, _TAIL_BYTES).splitlines():
        try:
            found = max(found, float(json.loads(line).get("step_ms", 0)) / 1000)
        except (ValueError, TypeError, AttributeError):  # a line that is cut off
            continue
    return round(found, 3)
