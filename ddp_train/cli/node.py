"""`ddp-train node`: an engine starts it on each machine of a run, by a task of SLURM or over ssh."""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ddp_train.cli.saved_run import TRUST, ask_trust, parse_words
from ddp_train.config.cluster import max_restarts
from ddp_train.errors import DONE, INTERRUPTED, PREEMPTED, TERMINATED, ConfigError, UserError
from ddp_train.launch import signals, source_copy
from ddp_train.launch.fork_requests import early_fork_server
from ddp_train.launch.job import Job, Training
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.node.program import run_node
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode, rendezvous_under_an_engine
from ddp_train.launch.node_facts.facts import collect
from ddp_train.launch.spec import Spec
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.sweep import update_table
from ddp_train.system.folder_lock import lock

USAGE = """ddp-train node SPEC [--index=N] [--launch=WORD] [--meeting=HOST:PORT]

  SPEC                 RUN/launch/spec.json, which every machine sees
  --index=N            number of this machine, from 0; default: from SLURM, or NODE_RANK
  --launch=WORD        a word that is the same on all machines and new for every launch; default: job, step and restart of SLURM
  --trust              allow a spec that another user has written to run as you; without it, the spec is only shown
  --meeting=HOST:PORT  address of machine 0; default: it takes a free port and writes it to the run folder

Engines start this; by hand `ddp-train cluster=machines ...` does the same. Exit code: 0 if the run is completed or saved
(`ddp-train verdict RUN` says which), else that of its failure.
"""

_OPTIONS = {"--index": "N", "--launch": "WORD", "--meeting": "HOST:PORT", TRUST: ""}
_SAVED = (DONE, PREEMPTED, INTERRUPTED, TERMINATED)
_UNLOCKED_WITHIN_S = 120.0  # after a machine is gone: the lease of a network file system
_POLL_S = 0.5


def node(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train node SPEC`: take part in a run as one of its machines. 0: the run is completed or saved."""
    options, (path,) = parse_words(arguments, USAGE, _OPTIONS)
    if Path(path).exists():
        ask_trust("node", arguments, Path(path))
    spec = Spec.read(Path(path))
    node_rank = int(options["--index"]) if "--index" in options else None
    launch_id, meeting = options.get("--launch"), options.get("--meeting")
    rendezvous = rendezvous_under_an_engine(spec, os.environ, node_rank=node_rank, launch_id=launch_id, meeting=meeting)
    with rendezvous.listener or nullcontext():
        return _run_own_part(spec, rendezvous, runner)


def _run_own_part(spec: Spec, rendezvous: NodeRendezvous, runner: JobRunner) -> int:
    """Lock the folder, collect the facts of this machine, and run."""
    run_folder = spec.job.run_folder
    if rendezvous.is_first and (code := _lock_folder(spec.job, runner)) is not None:
        return code
    try:
        _enter_environment(spec)
        this_node = _this_node(spec, rendezvous)
    except UserError as error:
        print(f"\n{error}", file=sys.stderr)
        if _fails_the_run(run_folder, rendezvous):  # the verdict reads the run's folder alone
            failure.from_exception(error, rank=0, step=None).record(run_folder)
        return error.exit_code
    runner.note_begun(run_folder.root)
    if rendezvous.is_first:
        update_table(run_folder.root, Status.RUNNING)
    early_fork_server.begin(uses_compiler=True)  # before other machines wait for this one: in a new attempt seconds count
    code = run_node(this_node, received=signals.early_stops)
    if rendezvous.is_first:
        update_table(run_folder.root)
    return DONE if code in _SAVED else code


def _enter_environment(spec: Spec) -> None:
    """Change into the folder where the command was typed, and let the ranks import the source copy."""
    if spec.code is not None:
        source_copy.require_unchanged(spec.code)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.code.python_path(), os.environ.get("PYTHONPATH", "")]))
        os.environ["PYTHONSAFEPATH"] = "1"  # else modules in the working directory would be imported first
    try:
        os.chdir(spec.working_directory)
    except OSError as error:
        happened = f"{spec.working_directory}, where the run was started, is not on this machine: {error.strerror}"
        raise ConfigError(happened=happened, expected="the folder that relative paths mean, on every machine") from None


def _this_node(spec: Spec, rendezvous: NodeRendezvous) -> ThisNode:
    assert rendezvous.node_rank is not None
    job, cluster = spec.job, spec.job.config.cluster
    if job.checkpoint is not None and job.run_folder.has_continued():
        job = replace(job, work=Training())  # an earlier launch of this spec has loaded it: now the newest one counts
    code = None if spec.code is None else Path(spec.code.folder)
    facts = collect(job.config, rendezvous, processes=spec.processes[rendezvous.node_rank], spec_hash=spec.hash(), code=code)
    return ThisNode(rendezvous=rendezvous, cluster=cluster, facts=facts, max_restarts=max_restarts(cluster, {}), job=job)


def _lock_folder(job: Job, runner: JobRunner) -> int | None:
    """Lock the run's folder for this launch (the first machine), before anything is written; return an exit code if it is not to begin."""
    deadline = time.monotonic() + _UNLOCKED_WITHIN_S
    while True:
        try:
            lock(job.run_folder.root, key="RUN")
            break
        except ConfigError:
            if signals.early_stops:  # a batch system does not wait
                return DONE
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)
    job.run_folder.archive_failure()
    no_progress = AttemptCount(job.run_folder).close_unfinished()
    return None if no_progress is None else runner.end_without_progress(job, no_progress)


def _fails_the_run(run_folder: RunFolder, rendezvous: NodeRendezvous) -> bool:
    """Tell whether an error of this machine fails the run: this launch has locked the folder, and steps are left to do."""
    deadline = time.monotonic() + _UNLOCKED_WITHIN_S  # the first machine writes its address when it has locked the folder
    while not rendezvous.is_first and (rendezvous.meeting_file is None or not rendezvous.registry_addresses()):
        if rendezvous.meeting_file is None or signals.early_stops or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return not run_folder.is_completed()
