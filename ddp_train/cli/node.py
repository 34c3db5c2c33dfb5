"""`ddp-train node`: an engine starts it on each machine of a run, by a task of SLURM or over ssh."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ddp_train.cli.saved_run import ask_trust, parse_words
from ddp_train.config.cluster import max_restarts
from ddp_train.errors import DONE, INTERRUPTED, NO_PROGRESS, PREEMPTED, TERMINATED, ConfigError, UserError
from ddp_train.launch import signals, source_copy
from ddp_train.launch.agent_process import start_fork_server
from ddp_train.launch.launcher import Launcher
from ddp_train.launch.node.facts import collect
from ddp_train.launch.node.program import run_node
from ddp_train.launch.node.slot import NodeSlot, Work, slot_under_an_engine
from ddp_train.launch.spec import Spec
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import check_progress
from ddp_train.run_folder.sweep import update_table
from ddp_train.system.folder_lock import hold

USAGE = """ddp-train node SPEC [--index=N] [--launch=WORD] [--meeting=HOST:PORT]

  SPEC                 RUN/launch/spec.json, which every machine sees
  --index=N            which machine this is, from 0; else as SLURM says, or NODE_RANK
  --launch=WORD        the same word on all machines, and no other start of the run has it; else job, step and restart of SLURM
  --trust              a spec that another user has written may run as you: without it, it is only shown
  --meeting=HOST:PORT  where machine 0 is found; else it takes a free port, and says in the run folder which

Engines start this; by hand `ddp-train cluster=machines ...` does the same. Exit code: 0 when the run is completed or saved
(`ddp-train verdict RUN` says which), else that of its failure.
"""

_SAVED = (DONE, PREEMPTED, INTERRUPTED, TERMINATED)
_UNLOCKED_WITHIN_S = 120.0  # after a machine is gone: the lease of a network file system
_POLL_S = 0.5


def node(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train node SPEC`: take part in a run as one of its machines. 0: the run is completed or saved."""
    options, (path,) = parse_words(arguments, USAGE)
    if Path(path).exists():
        ask_trust("node", arguments, Path(path))
    spec = Spec.read(Path(path))
    index = int(options["--index"]) if "--index" in options else None
    slot = slot_under_an_engine(spec, os.environ, index=index, launch=options.get("--launch"), meeting=options.get("--meeting"))
    with slot.listener or nullcontext():
        return _take_part(spec, slot, launcher)


def _take_part(spec: Spec, slot: NodeSlot, launcher: Launcher) -> int:
    """Lock the folder, collect the facts of this machine, and run."""
    run_folder = spec.job.run_folder
    if slot.is_first and (code := _lock_folder(run_folder)) is not None:
        return code
    try:
        _enter_environment(spec)
        work = _work(spec, slot)
    except UserError as error:
        print(f"\n{error}", file=sys.stderr)
        if _fails_the_run(run_folder, slot):  # the verdict reads the run's folder alone
            failure.from_exception(error, rank=0, step=None).record(run_folder)
        return error.exit_code
    launcher.begun = run_folder.root
    if slot.is_first:
        update_table(run_folder.root, Status.RUNNING)
    start_fork_server(uses_compiler=True)  # before other machines wait for this one: in a new round seconds count
    code = run_node(work, slot, received=signals.received_early)
    if slot.is_first:
        update_table(run_folder.root)
    return DONE if code in _SAVED else code


def _enter_environment(spec: Spec) -> None:
    """Change into the folder where the command was typed, and let the ranks import the source copy."""
    if spec.code is not None:
        source_copy.verify(spec.code)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.code.python_path(), before]))
        os.environ["PYTHONSAFEPATH"] = "1"  # else modules in the working directory would be imported first
    try:
        os.chdir(spec.working_directory)
    except OSError as error:
        raise ConfigError(
            happened=f"{spec.working_directory}, where the run was started, is not on this machine: {error.strerror}",
            expected="the folder that relative paths mean, on every machine",
        ) from None


def _work(spec: Spec, slot: NodeSlot) -> Work:
    """Return the part of a run that this machine does."""
    assert slot.index is not None
    job, cluster = spec.job, spec.job.config.cluster
    if job.checkpoint is not None and job.run_folder.has_continued():
        job = replace(job, checkpoint=None)  # an earlier start of this spec has loaded it: now the newest one counts
    processes = spec.processes[slot.index]
    facts = collect(
        job.config,
        launch=slot.launch,
        node=slot.index,
        nodes=f"{spec.min_nodes}:{spec.max_nodes}",
        processes=processes,
        spec_hash=spec.hash(),
        code=None if spec.code is None else Path(spec.code.folder),
    )
    restarts = max_restarts(cluster, {})
    return Work(cluster=cluster, processes=processes, facts=facts, max_restarts=restarts, token=spec.token, job=job)


def _lock_folder(run_folder: RunFolder) -> int | None:
    """Lock the run's folder for this start of the run (the first machine); return an exit code where it is not to begin.

    Nothing is written into it before it is locked. A stop signal ends the waiting.
    """
    deadline = time.monotonic() + _UNLOCKED_WITHIN_S
    while True:
        try:
            hold(run_folder.root, key="RUN")
            break
        except ConfigError:
            if signals.received_early:  # a batch system does not wait
                return DONE
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)
    if problem := check_progress(run_folder):
        print(problem, file=sys.stderr)
        return NO_PROGRESS
    run_folder.forget_failure()
    return None


def _fails_the_run(run_folder: RunFolder, slot: NodeSlot) -> bool:
    """Tell whether an error of this machine fails the run: this start of the run has locked the folder, and steps are left to do.

    The first machine has locked it. Another one waits for the address that the first writes after that.
    """
    deadline = time.monotonic() + _UNLOCKED_WITHIN_S
    while not slot.is_first and (slot.notice is None or not slot.registry_addresses()):
        if slot.notice is None or signals.received_early or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return not run_folder.is_completed()
