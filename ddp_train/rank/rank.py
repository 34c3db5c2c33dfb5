"""What each rank does: it opens the process group, and runs one job in it (`main` says which).

Whatever goes wrong in a job (`run_job`) is told here, once, by the rank that knows most of it.
"""

import logging
import os
import re
import signal
import subprocess
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TextIO

from torch.distributed import DistError, Store

from ddp_train.config import cluster
from ddp_train.config.targets.locate import locate
from ddp_train.distributed.attempt import Attempt
from ddp_train.distributed.store import wait_for
from ddp_train.distributed.world import World, open_world
from ddp_train.errors import FINAL, UserError
from ddp_train.launch.job import Evaluation, Job, Program
from ddp_train.launch.walltime import stops_at
from ddp_train.loader.worker_pool import start_server
from ddp_train.rank import summary
from ddp_train.rank.log import rank_log
from ddp_train.rank.out_of_memory import part_short_of_memory, settings_for_less_memory
from ddp_train.rank.peers import Neighbour, Peers
from ddp_train.rank.run_job import run_job
from ddp_train.rank.stop import Stop
from ddp_train.run_folder import failure, restart_note
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Result, status_of
from ddp_train.run_folder.starts import count_attempt, end_attempt
from ddp_train.system import stack_dump, stack_text, torchrun_env
from ddp_train.system.devices import resolve_device
from ddp_train.system.phase import Phases
from ddp_train.system.process import HAS_SHARED_MEMORY, exit_code_of, keep_freed
from ddp_train.system.torchrun_env import is_last_attempt
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.parts.compiled import end_compilers
from ddp_train.training.seeding import be_deterministic
from ddp_train.training.train_state import TrainState
from ddp_train.watchdog.client import WatchRequest, collective_timeout, start_watchdog, write_heartbeats
from ddp_train.watchdog.flight_recorder import FlightRecorder, without_records

logger = logging.getLogger(__name__)

LOST = "Another rank ended without a report and broke the connection"
"""What a rank adds to its failure when its collective broke: it is not the one to blame."""

_MEET_WITHIN_S = 300.0
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


def serve_job(job: Job, attempt: Attempt, *, is_users_agent: bool = False) -> int:
    """Train as one of a job's ranks, or do what it does in the place of training; return the exit code."""
    if isinstance(job.work, Program):
        return int(locate(job.work.function)(attempt, job))
    restart_note.remember_run(job.begins_at)
    return run_rank(job, attempt.store, attempt.rank, attempt.size, is_users_agent=is_users_agent)


def run_rank(job: Job, store: Store, rank: int, size: int, *, is_users_agent: bool = False, remark: str | None = None) -> int:
    """Run a job as one of its ranks and return the exit code. Whatever goes wrong is recorded, shown once, and ends this process.

    Args:
        store: empty at the beginning.
        is_users_agent: the agent is a user's torchrun, which knows nothing of runs.
        remark: for the job's log.
    """
    started, state, phases = time.monotonic(), TrainState(), Phases()
    write_heartbeats(phases)
    peers: Peers | None = None
    with rank_log(job.run_folder, rank, shows=not job.in_sweep) as terminal:
        if remark is not None:
            logger.warning("%s", remark)
        try:
            watchdog = _start_watchdog(job, store, rank, size, terminal)
            world = _open_world(job, store, rank, size)
            peers = Peers.connect(world)
            stop = _make_stop(job, world, peers, terminal, is_users_agent=is_users_agent)
            with stop.listening():
                if world.is_main:
                    with suppress(OSError):  # a full disk: the run will say so itself
                        count_attempt(job.run_folder)
                code = _train_or_evaluate(job, world, state, stop, phases)
                end_compilers()
                if watchdog is not None and watchdog.stdin is not None:
                    watchdog.stdin.close()
        except BaseException as error:  # sys.exit in a component is no way to leave either
            is_by_peer = _comes_from_a_peer(error)
            report = _find_cause(error, job, state, peers, rank=rank, is_by_peer=is_by_peer)
            if not job.in_sweep and (file := torchrun_env.error_file()):
                report.tell_torchrun(file, is_by_peer=is_by_peer)
            _show(report, job, terminal, seconds=time.monotonic() - started, is_by_peer=is_by_peer)
            first = failure.load_report(job.run_folder.failure) or report  # on another machine there is an agent that knows no other reason
            os._exit(first.exit_code)  # not sys.exit: other ranks wait in a collective, and a tidy end would wait for them
    if code in EXIT_CODE_OF_STOP.values():
        stop.end_agent()
    return code


def _start_watchdog(job: Job, store: Store, rank: int, size: int, terminal: TextIO) -> subprocess.Popen[bytes] | None:
    """Start the watchdog of this machine, on local rank 0; it watches until its input is closed. None where there is none."""
    stack_dump.dump_on_request()  # before others know this process, and may ask for its stacks
    store.set(f"watch/{rank}", str(os.getpid()))
    if torchrun_env.local_rank() != 0 or not HAS_SHARED_MEMORY:  # else a process cannot see what another one does
        return None
    ranks = range(rank, rank + torchrun_env.local_world_size())  # torchrun counts a machine's ranks one after another
    deadline = time.monotonic() + _MEET_WITHIN_S
    settings = job.config.cluster
    request = WatchRequest(
        run_folder=str(job.run_folder.root),
        pids=[(watched, int(wait_for(store, f"watch/{watched}", within_s=deadline - time.monotonic()))) for watched in ranks],
        world_size=size,
        start_timeout_s=settings.start_timeout_s,
        step_timeout_s=settings.step_timeout_s,
        uses_device=resolve_device(settings.device) == "cuda",
        shows=not job.in_sweep,
    )
    return start_watchdog(request, terminal)


def _open_world(job: Job, store: Store, rank: int, size: int) -> World:
    """Prepare this process for the job, open the process group, and return the ranks. Collective."""
    config = job.config
    if size != config.batch.world_size:
        raise UserError(key="cluster", happened=f"{size} ranks were started for a job of {config.batch.world_size}")
    device = resolve_device(config.cluster.device)
    # Before CUDA starts and the process group opens: cuBLAS and NCCL look at it then, and never again.
    os.environ.update(cluster.environment_of(config.cluster.env, deterministic=config.deterministic, inherited=os.environ))
    if config.deterministic:
        be_deterministic()
    recorder = FlightRecorder(rank, job.run_folder.logs) if device == "cuda" else None
    os.environ.update(recorder.environment if recorder is not None else without_records(os.environ))
    if recorder is None:
        keep_freed(os.environ)  # tensors come from the C library; in loader workers, which are forked, too
    if config.loader.num_workers:
        start_server()
    timeout = collective_timeout(config.cluster.start_timeout_s, config.cluster.step_timeout_s)
    world = open_world(store, rank, size, device=device, timeout=timeout)
    if recorder is not None:
        recorder.hide_pipe(is_expected=world.has_group)
    return world


def _make_stop(job: Job, world: World, peers: Peers, terminal: TextIO, *, is_users_agent: bool) -> Stop:
    """Return what stops the ranks of a job together."""

    def show_lost_rank(lost: Neighbour, doing: dict[int, str]) -> None:
        _show(failure.from_exit(rank=lost.rank, pid=lost.pid, exit_code=None).with_others(doing), job, terminal)

    return Stop(
        world=world,
        peers=peers,
        on_untrained_stop=partial(_record_untrained_stop, job.run_folder),
        report_lost_rank=show_lost_rank if is_users_agent else None,
        stops_at=None if job.in_sweep else stops_at(job.config.cluster),  # a sweep stops as a whole
        ask_stops_at=lambda: stops_at(job.config.cluster, asks_slurm=True),
        ends_agent=is_users_agent,
    )


def _record_untrained_stop(run_folder: RunFolder, number: signal.Signals) -> None:
    """Record and print that a stop came before the first step (rank 0)."""
    end_attempt(run_folder, is_saved=False)
    if not run_folder.is_completed():
        Result(status=status_of(number)).write(run_folder.result)
    print(summary.stopped(run_folder, None), flush=True)


def _train_or_evaluate(job: Job, world: World, state: TrainState, stop: Stop, phases: Phases) -> int:
    """Do the work of a job; a plain run imports that of no other."""
    if isinstance(job.work, Evaluation):
        from ddp_train.rank.evaluate_job import evaluate_job

        return evaluate_job(job, job.work, world, state, phases)  # it asks for no stop, which ends the ranks at once
    if job.config.debug.resume_after_steps is not None:
        from ddp_train.rank.paused_run import run_with_pause

        return run_with_pause(job, world, state, stop, phases)
    return run_job(job, world, state, stop, phases)


def _comes_from_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank went away: then this rank is not the one to blame.

    torch has one type of error for all that can go wrong with a collective or the store, so the text decides.
    """
    is_a_collectives = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
    return is_a_collectives and _PEER_IS_GONE.search(str(error)) is not None and _IS_OWN.search(str(error)) is None


def _find_cause(error: BaseException, job: Job, state: TrainState, peers: Peers | None, *, rank: int, is_by_peer: bool) -> failure.Failure:
    """Return who is to blame for an error of this rank, and what the others were doing.

    Where it `is_by_peer`, this waits up to 3 s for the report of the rank that broke the connection.
    """
    where = _log_and_announce(error, peers, rank=rank, is_by_peer=is_by_peer)
    left = _wait_for_quiet_exit(job, peers) if is_by_peer else None
    if left is not None and peers is not None:
        message = f"rank {left.rank} exited with code 0 after step {state.step} while the others were still training"
        fix = "look for os._exit in the code that this run uses"
        report = failure.Failure(rank=left.rank, pid=left.pid, step=state.step, error="EarlyExit", message=message, fix=fix)
        return report.with_others(peers.ask_others() | {rank: where})
    report = failure.from_exception(error, rank=rank, step=state.step or None)
    if is_out_of_memory(error):
        part = part_short_of_memory(error)
        message = f"out of memory in {part or 'the run'}: {report.message}"
        report = replace(report, key="", message=message, fix=settings_for_less_memory(job.config, part))
    return report if peers is None or job.run_folder.failure.exists() else report.with_others(peers.ask_others())


def _log_and_announce(error: BaseException, peers: Peers | None, *, rank: int, is_by_peer: bool) -> str:
    """Log an error of this rank, tell the other ranks, and return where it came."""
    where = stack_text.describe(traceback.extract_tb(error.__traceback__))
    if peers is not None:
        peers.report_activity(where if is_by_peer else f"failed with {type(error).__name__}, {where}", has_lost_rank=is_by_peer)
    logger.exception("rank %d failed", rank)
    if is_by_peer:
        error.add_note(f"{LOST}: see the logs of the other ranks.")
    return where


def _wait_for_quiet_exit(job: Job, peers: Peers | None) -> Neighbour | None:
    """Return the neighbour that left with exit code 0, in which no agent finds anything wrong; None: the cause is reported, or unknown.

    Whoever broke the connection, or the agent that saw it end, gets time to say why; it ends this rank meanwhile.
    """
    deadline, reaped = time.monotonic() + _PEER_REPORTS_S, 0.0
    while time.monotonic() < deadline and not job.run_folder.failure.exists():
        time.sleep(0.005)
        gone = peers.dead_neighbour() if peers is not None and not job.in_sweep else None  # in a sweep its member knows how it ended
        if gone is None:
            continue
        exit_code = exit_code_of(gone.pid)
        reaped = reaped or (time.monotonic() if exit_code is None else 0.0)
        if exit_code == 0 or (reaped and time.monotonic() - reaped > _AGENT_ACTS_S):
            return gone
    if job.run_folder.failure.exists():
        time.sleep(_AGENT_ACTS_S)  # whoever has written it, the signals' thread of this very process perhaps, has yet to show it
    return None


def _show(report: failure.Failure, job: Job, terminal: TextIO, *, seconds: float = 0.0, is_by_peer: bool = False) -> None:
    """Record a failure, and show it unless another one was earlier. A sweep shows its jobs' failures itself.

    Where it `is_by_peer` and no report can be written, as on a full disk, that rank has shown its own.
    """
    is_first = report.record(job.run_folder, seconds=seconds) and not (is_by_peer and not job.run_folder.failure.exists())
    if is_first and not job.in_sweep and (is_last_attempt() or report.exit_code in FINAL):
        print(report.screen(job.run_folder), file=terminal, flush=True)
