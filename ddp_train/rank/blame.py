"""Finds the rank that caused an error that ends this one. The rank that knows most of the error records and shows it, once."""

import logging
import os
import re
import time
import traceback
from dataclasses import replace
from typing import TextIO

from torch.distributed import DistError

from ddp_train.errors import FINAL
from ddp_train.launch.job import Job
from ddp_train.rank.peers import Neighbour, Peers
from ddp_train.run_folder import failure
from ddp_train.system import process_env
from ddp_train.system.process import exit_code_of
from ddp_train.system.stack_dump import describe_stack
from ddp_train.training.check.memory import is_out_of_memory, part_short_of_memory, settings_for_less_memory
from ddp_train.training.train_state import TrainState

logger = logging.getLogger(__name__)

_PEER_REPORTS_S = 3.0  # below what the agents of other machines take to notice that one is gone
_PEER_IS_GONE = re.compile(  # in the words of gloo, of torch's store, of NCCL and of the sockets below them
    r"Connection (was likely )?closed|Socket (unexpectedly )?closed|closed by (remote )?peer"
    r"|Connection (reset by peer|timed out|refused)|Broken pipe|Software caused connection abort|No route to host|Host is down"
    r"|(Read|Write|Connect|wait|barrier|socket) timeout|Timed out (waiting|after)|Application timeout caused pair closure"
    r"|client socket has (timed out|failed to connect)|[Ff]ailed to (recv|send)|connectFullMesh failed"
    r"|ncclRemoteError|Got completion from peer|communicator was aborted|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
_IS_OWN = re.compile(r"CUDA (error|failure|[cm]alloc)|out of memory", re.IGNORECASE)  # in whatever they are wrapped
_AGENT_ACTS_S = 0.5  # after it has seen a rank end of something else than exit code 0


def report_failure(
    error: BaseException, job: Job, state: TrainState, peers: Peers | None, terminal: TextIO, *, rank: int, started: float
) -> int:
    """Find the cause of an error of this rank, record and show it, and return the exit code of the run.

    If another rank broke the connection, this waits up to 3 s for the report of that one. `started` is by the monotonic clock.
    """
    is_by_peer = _comes_from_a_peer(error)
    where = describe_stack(traceback.extract_tb(error.__traceback__))
    if peers is not None:
        peers.report_activity(where if is_by_peer else f"failed with {type(error).__name__}, {where}", has_lost_rank=is_by_peer)
    logger.exception("rank %d failed", rank)
    if is_by_peer:
        error.add_note("Another rank ended without a report and broke the connection: see the logs of the other ranks.")
    quiet = _wait_for_quiet_exit(job, peers) if is_by_peer else None
    if quiet is None:
        report = _own_failure(error, job, state, rank=rank)
        report = replace(report, kind=failure.FailureKind.CONNECTION) if is_by_peer else report
    else:
        message = f"rank {quiet.rank} exited with code 0 after step {state.step} while the others were still training"
        fix = "look for os._exit in the code that this run uses"
        report = failure.Failure(rank=quiet.rank, pid=quiet.pid, step=state.step, error="EarlyExit", message=message, fix=fix)
    if peers is not None and (quiet is not None or not job.run_folder.failure.exists()):
        report = report.with_others(peers.ask_others() | ({} if quiet is None else {rank: where}))
    if not job.in_sweep and (file := process_env.error_file()):
        report.tell_torchrun(file, is_by_peer=is_by_peer)
    _record_and_show(report, job, terminal, seconds=time.monotonic() - started, is_by_peer=is_by_peer)
    return (failure.load_report(job.run_folder.failure) or report).exit_code  # an agent elsewhere knows no other reason


def report_lost_rank(job: Job, terminal: TextIO, lost: Neighbour, doing: dict[int, str]) -> None:
    """Record and show that a rank ended without a report, and what the others were doing."""
    _record_and_show(failure.from_exit(rank=lost.rank, pid=lost.pid, exit_code=None).with_others(doing), job, terminal)


def _comes_from_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank went away: then this rank is not the one to blame.

    torch has one type of error for all that can go wrong with a collective or the store, so the text decides.
    """
    is_a_collectives = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
    return is_a_collectives and _PEER_IS_GONE.search(str(error)) is not None and _IS_OWN.search(str(error)) is None


def _wait_for_quiet_exit(job: Job, peers: Peers | None) -> Neighbour | None:
    """Return the neighbour that left with exit code 0, in which no agent finds anything wrong; None: the cause is reported, or unknown.

    The rank that broke the connection, or the agent that saw it end, gets time to say why; the agent may end this rank meanwhile.
    """
    deadline = time.monotonic() + _PEER_REPORTS_S
    reaped = 0.0  # since when its exit code is gone: its agent has read it
    while time.monotonic() < deadline and not job.run_folder.failure.exists():
        time.sleep(0.005)
        has_member = process_env.PLACE in os.environ  # which knows how its rank ended
        gone = peers.dead_neighbour() if peers is not None and not has_member else None
        if gone is None:
            continue
        exit_code = exit_code_of(gone.pid)
        reaped = reaped or (time.monotonic() if exit_code is None else 0.0)
        if exit_code == 0 or (reaped and time.monotonic() - reaped > _AGENT_ACTS_S):
            return gone
    if job.run_folder.failure.exists():
        time.sleep(_AGENT_ACTS_S)  # its writer, which may be the signals' thread of this process, has yet to show it
    return None


def _own_failure(error: BaseException, job: Job, state: TrainState, *, rank: int) -> failure.Failure:
    """Describe an error of this rank; one for want of memory with the settings that need less."""
    report = failure.from_exception(error, rank=rank, step=state.step or None)
    if not is_out_of_memory(error):
        return report
    part = part_short_of_memory(error)
    message = f"out of memory in {part or 'the run'}: {report.message}"
    return replace(report, key="", message=message, fix=settings_for_less_memory(job.config, part))


def _record_and_show(report: failure.Failure, job: Job, terminal: TextIO, *, seconds: float = 0.0, is_by_peer: bool = False) -> None:
    """Record a failure, and show it unless another one was earlier. A sweep shows its jobs' failures itself.

    Where it `is_by_peer` and no report can be written, as on a full disk, that rank has shown its own.
    """
    is_first = report.record(job.run_folder, seconds=seconds) and not (is_by_peer and not job.run_folder.failure.exists())
    if is_first and not job.in_sweep and (process_env.is_last_attempt() or report.exit_code in FINAL):
        print(report.screen(job.run_folder), file=terminal, flush=True)
