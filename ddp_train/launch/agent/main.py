"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs and shows the one screen
that the failing rank left, or says itself which rank died of what.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, FINAL, NO_PROGRESS, UserError
from ddp_train.launch.agent import elastic, rendezvous
from ddp_train.launch.agent.ranks import Ranks, fits
from ddp_train.redaction import Redacting
from ddp_train.run_folder import failure
from ddp_train.run_folder.attempts import count_failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result
from ddp_train.system import handover
from ddp_train.system.nursery import Become
from ddp_train.system.process import STOP_SIGNALS, oom_kills, ran_out

_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)
_OPTIONS = ("--grace-s=", "--run-dir=", "--group=", "--log=", "--restarts=")
"""Ours: cluster.grace_s; the folder of the run; the folder of a sweep's ranks, in which a file names that of the job at hand; where torch's
own lines go; how often the ranks of a run over several machines were started again: then this agent starts them once and counts nothing."""


def be_agent(request: Mapping[str, Any], be_rank: Become, *, loaded_with: Mapping[str, str]) -> int:
    """Be the agent that was asked for (`launch.agent_process`), and return its exit code.

    Args:
        be_rank: what is done in each process that is forked as a rank.
        loaded_with: the environment in which this process has imported what it has.
    """
    environment = {**request["environment"], handover.AGENT: str(os.getpid())}
    for name in loaded_with.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)  # beside what torch has set while it was imported
    ranks = Ranks(be_rank, request["files"], is_forked=fits(environment, loaded_with))
    try:
        return main(request["arguments"], ranks)
    finally:
        ranks.end()


def main(arguments: list[str], ranks: Ranks) -> int:
    """Run the agent to its end and return the exit code of the run.

    Args:
        ranks: starts them.
        arguments: --grace-s=SECONDS [--run-dir=DIR [--restarts=N] | --group=DIR --log=FILE] TORCHRUN_OPTIONS -m MODULE ARGS
    """
    given = _take_options(arguments)
    run_folder = RunFolder(Path(given["--run-dir="])) if "--run-dir=" in given else None
    signals = ",".join(number.name for number in _PASSED_ON)
    options = torchrun.parse_args([f"--signals-to-handle={signals}", "--monitor-interval=0.001", *arguments])  # `elastic` waits itself
    in_round = "--restarts=" in given  # of several machines: the first one's node program decides what follows (`node/rounds.py`)
    restarts = int(given.get("--restarts=", "0"))
    number = next((int(part.removeprefix("rank=")) for part in options.rdzv_conf.split(",") if part.startswith("rank=")), 0)
    _quieten(Path(given["--log="]) if "--log=" in given else run_folder.agent_log(number) if run_folder is not None else None)
    rendezvous.register()
    started, kills_before = time.monotonic(), oom_kills()
    before = None if run_folder is None else failure.read_result(run_folder)
    verdict: str | None = None  # on the last failure
    is_reported = False  # by us, in a round

    def again(failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        nonlocal verdict, is_reported
        verdict = None
        if (restarts_left == 0 and not in_round) or _has_ended(run_folder, before):
            return False
        if run_folder is not None:
            rank, first = elastic.first_of(failures)
            found = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=run_folder)
            is_recorded = found.record(run_folder)  # if it left no word
            if in_round:  # at once: ranks of other machines wait for it, and would name this one's neighbours otherwise
                is_reported = is_recorded
                return False
            verdict = count_failure(run_folder, has_failed=True)
        return not in_round and not verdict and _code(failures) not in FINAL

    try:
        elastic.run(options, ranks, grace_s=int(given["--grace-s="]), again=again, restarts=restarts)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        found = failure.from_exit(
            rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=run_folder, was_out_of_memory=ran_out(kills_before)
        )
        if "--group=" in given:
            _record_for_group(found, Path(given["--group="]))
        elif _has_ended(run_folder, before):
            print(f"{found.who} has died after the run had ended: {found.message}", file=sys.stderr, flush=True)
        elif run_folder is not None:
            found = found.with_others(
                failure.last_words(run_folder, {other: each.pid for other, each in error.failures.items() if other != rank})
            )
            is_first = is_reported or (not verdict and found.record(run_folder, seconds=time.monotonic() - started))
            is_shown = not in_round or restarts == options.max_restarts
            if is_first and is_shown and os.path.exists(run_folder.failure):  # else the disk is full, and the rank has shown its screen
                print(found.screen(run_folder), file=sys.stderr, flush=True)
            if in_round:
                return _code(error.failures)
            verdict = count_failure(run_folder, has_failed=True) if verdict is None else verdict
            if verdict:
                print(verdict, file=sys.stderr, flush=True)
                return NO_PROGRESS
        elif first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {found.host} (pid {found.pid}): {found.message}", file=sys.stderr, flush=True)
        return _code(error.failures)
    except SignalException as error:
        return 128 + int(error.sigval)
    except DistError as error:
        if in_round:  # another machine was lost just then, and is named by those who have seen it
            logging.getLogger("torch").warning("the ranks' store is gone: %s", error)
            return FAILED
        reason = str(error).partition("\n")[0]
        print(f"\n{UserError(key='cluster', happened=f'the ranks cannot meet on this machine: {reason}')}", file=sys.stderr, flush=True)
        return ENVIRONMENT_REFUSES
    return 0


def _has_ended(run_folder: RunFolder | None, before: Result | None) -> bool:
    """Tell whether a run was completed, or stopped in good order, since this agent began: a rank that dies after that changes nothing."""
    return run_folder is not None and failure.ended_since(run_folder, before) is not None


def _take_options(arguments: list[str]) -> dict[str, str]:
    """Take our own options from the front of the arguments."""
    given = {}
    while option := next((option for option in _OPTIONS if arguments and arguments[0].startswith(option)), None):
        given[option] = arguments.pop(0).removeprefix(option)
    return given


def _record_for_group(found: failure.Failure, group: Path) -> None:
    """Say in the folder of the job at hand why its group is gone; the launcher shows it."""
    job = group / "run_folder"
    run_folder = RunFolder(Path(job.read_text()))
    if not run_folder.is_completed():
        found.record(run_folder, seconds=time.time() - job.stat().st_mtime)


def _code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the run: the one of a rank that says what a person has to do, or that of the first that failed."""
    said = [each.exitcode for each in failures.values() if each.exitcode in FINAL]
    return said[0] if said else max(FAILED, elastic.first_of(failures)[1].exitcode)


def _quieten(log: Path | None) -> None:
    """Send what torch's agent logs to a file, which is created with the first line."""
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not drown the failure's screen
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    handler: logging.Handler = logging.NullHandler()
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log, delay=True)
        handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("torch", "torch.distributed", "torch.distributed.run", "torch.distributed.elastic"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name.count(".") > 0
    logging.getLogger("torch").addHandler(handler)
