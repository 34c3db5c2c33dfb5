"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs and shows the one screen that the
failing rank left, or says itself which rank died of what. Whether all ranks are started again after a failure is decided here, too.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, FINAL, NO_PROGRESS, UserError
from ddp_train.launch.agent import elastic
from ddp_train.launch.agent.ranks import Ranks, loads_alike
from ddp_train.launch.agent_process import AgentOptions, AgentRequest
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.starts import NoProgress, fail_attempt
from ddp_train.system import process_env, torch_internals
from ddp_train.system.fork_server import RequestHandler
from ddp_train.system.process import STOP_SIGNALS, file_in_memory, oom_kills, path_of, ran_out
from ddp_train.system.redaction import Redacting

_TORCH_AGENT = (
    "agent    torchrun's own: ranks have 30 s after a stop signal and none after a second one, whatever cluster.grace_s says;"
    " each failure is started again, up to cluster.max_restarts"
)
_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)


def become_agent(request: AgentRequest, *, loaded_with: Mapping[str, str], become_rank: RequestHandler) -> int:
    """Run the agent that was asked for (`launch.agent_process.start_agent`) in this process, and return its exit code.

    `loaded_with`: the environment in which this process has imported. `become_rank`: what each process does that is forked as a rank.
    """
    environment = {**request.environment, process_env.AGENT: str(os.getpid())}
    if process_env.JOB in environment:  # in a variable, an exec has room for 128 KiB of it
        environment[process_env.JOB] = path_of(file_in_memory(environment[process_env.JOB].encode()))
    for name in loaded_with.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)  # added to what torch has set while it was imported
    ranks = Ranks(become_rank, files=request.files, imports=request.imports, is_forked=loads_alike(environment, loaded_with))
    try:
        return run_torchrun(request.options, request.arguments, ranks)
    finally:
        ranks.end()


def run_torchrun(options: AgentOptions, arguments: list[str], ranks: Ranks) -> int:
    """Run the agent, with torchrun's arguments, to its end and return the exit code of the run."""
    signals = ",".join(number.name for number in _PASSED_ON)
    lacks = torch_internals.missing(torch_internals.OF_AGENT)
    uses_torch_agent = options.uses_torch_agent or bool(lacks)
    interval = "0.1" if uses_torch_agent else "0.001"  # `elastic` waits itself
    torchrun_args = torchrun.parse_args([f"--signals-to-handle={signals}", f"--monitor-interval={interval}", *arguments])
    node_rank = next((int(part.removeprefix("rank=")) for part in torchrun_args.rdzv_conf.split(",") if part.startswith("rank=")), 0)
    _quieten(options.run_folder.agent_log(node_rank) if options.run_folder is not None else None)
    elastic.register_rendezvous()
    is_last = options.restarts == torchrun_args.max_restarts
    failures = FailuresOfAttempt(options, is_last=is_last) if options.is_one_attempt else Failures(options)
    if uses_torch_agent and options.is_one_attempt:
        print(f"\n{UserError(key='cluster', happened=lacks[0], fix='torchrun --nnodes=N -m ddp_train on each machine')}", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    try:
        if uses_torch_agent:
            print(*lacks, _TORCH_AGENT, sep="\n", flush=True)
            torchrun.run(torchrun_args)
        else:
            elastic.run_elastic_agent(
                torchrun_args, ranks, grace_s=options.grace_s, handle_failures=failures.handle, restarts=options.restarts or 0
            )
    except ChildFailedError as error:
        return failures.end(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except DistError as error:
        if options.is_one_attempt:  # another machine was lost just then, and is named by those who have seen it
            logging.getLogger("torch").warning("the ranks' store is gone: %s", error)
            return FAILED
        reason = str(error).partition("\n")[0]
        print(f"\n{UserError(key='cluster', happened=f'the ranks cannot meet on this machine: {reason}')}", file=sys.stderr, flush=True)
        return ENVIRONMENT_REFUSES
    return 0


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


class Failures:
    """Records and shows failures of the ranks of an agent that is alone, and decides on restarts. Made before the ranks are started."""

    def __init__(self, options: AgentOptions) -> None:
        self._in_sweep, self._run_folder = options.in_sweep, options.run_folder
        self._began, self._kills_before = time.monotonic(), oom_kills()
        self._before = None if options.run_folder is None else options.run_folder.read_result()
        self._no_progress: NoProgress | None = None  # why a restart would get no further

    def handle(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        """Record failures, and tell whether the ranks are started again (`elastic.HandleFailures`)."""
        if self._has_ended() or restarts_left == 0:
            return False
        if self._run_folder is not None:
            _record_first(failures, self._run_folder)
        if _code(failures) in FINAL:
            return False
        if self._run_folder is not None:
            self._no_progress = fail_attempt(self._run_folder)
        return self._no_progress is None

    def end(self, error: ChildFailedError) -> int:
        """Say that the ranks have failed and are not started again, and return the exit code of the run."""
        rank, first = error.get_first_failure()
        run_folder, ran_oom = self._run_folder, ran_out(self._kills_before)
        report = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=run_folder, was_out_of_memory=ran_oom)
        if self._has_ended():
            print(f"{report.who} died after the run had ended: {report.message}", file=sys.stderr, flush=True)
        elif run_folder is not None:
            others = {other: each.pid for other, each in error.failures.items() if other != rank}
            self._end_run(run_folder, report.with_others(failure.last_activities(run_folder, others)))
            if self._no_progress is not None:
                return NO_PROGRESS
        elif first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {report.host} (pid {report.pid}): {report.message}", file=sys.stderr, flush=True)
        return _code(error.failures)

    def _end_run(self, run_folder: RunFolder, report: failure.Failure) -> None:
        """Record and show the failure of a run, and why it gets nowhere, if so; in a sweep only record it."""
        if self._in_sweep:
            report.record(run_folder, seconds=time.monotonic() - self._began)
            return
        if self._no_progress is None:
            if report.record(run_folder, seconds=time.monotonic() - self._began):
                _show(report, run_folder)
            self._no_progress = fail_attempt(run_folder)
        if self._no_progress is not None:
            self._no_progress.show(run_folder)

    def _has_ended(self) -> bool:
        """Tell whether the run was completed or stopped since this agent was made: a rank that dies after that changes nothing."""
        return self._run_folder is not None and self._run_folder.has_ended_since(self._before)


class FailuresOfAttempt(Failures):
    """The failures of an agent for one attempt on several machines. The first machine decides what follows; `is_last`: nothing follows."""

    def __init__(self, options: AgentOptions, *, is_last: bool) -> None:
        super().__init__(options)
        self._is_last = is_last
        self._has_recorded = False  # it was this agent that wrote failure.json

    def handle(self, failures: Mapping[int, ProcessFailure], restarts_left: int) -> bool:
        """Record at once why the ranks have ended: those of other machines wait for it, and would name this one's neighbours otherwise."""
        if self._run_folder is not None and not self._has_ended():
            self._has_recorded = _record_first(failures, self._run_folder)
        return False

    def _end_run(self, run_folder: RunFolder, report: failure.Failure) -> None:
        if (self._has_recorded or report.record(run_folder, seconds=time.monotonic() - self._began)) and self._is_last:
            _show(report, run_folder)


def _show(report: failure.Failure, run_folder: RunFolder) -> None:
    if run_folder.failure.exists():  # else the disk is full, and the rank has shown its screen
        print(report.screen(run_folder), file=sys.stderr, flush=True)


def _record_first(failures: Mapping[int, ProcessFailure], run_folder: RunFolder) -> bool:
    """Record the first failure if its rank has written no report itself; tell whether it was recorded here."""
    rank, first = _first_of(failures)
    return failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, run_folder=run_folder).record(run_folder)


def _first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    return min(failures.items(), key=lambda item: item[1].timestamp)


def _code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the run: the one of a rank that says what a person has to do, or that of the first that failed."""
    return next((each.exitcode for each in failures.values() if each.exitcode in FINAL), max(FAILED, _first_of(failures)[1].exitcode))
