"""What each rank does: it opens the process group, runs one job in it (`main` says which), and reports what goes wrong (`blame`)."""

import logging
import os
import signal
import sys
import time
from functools import partial
from typing import NamedTuple, TextIO

from torch.distributed import Store

from ddp_train.config import cluster
from ddp_train.config.targets.locate import locate
from ddp_train.distributed.store import MEET_WITHIN_S, JoinedAttempt, wait_for
from ddp_train.distributed.world import World, open_world
from ddp_train.errors import DONE, UserError
from ddp_train.launch import restart_note
from ddp_train.launch.job import Evaluation, Job, RankProgram, stops_at
from ddp_train.rank import summary
from ddp_train.rank.blame import report_failure, report_lost_rank
from ddp_train.rank.log import redirect_output
from ddp_train.rank.peers import Peers
from ddp_train.rank.provenance import code_captured
from ddp_train.rank.stop import Stop
from ddp_train.rank.train_job import RankRun, train_job
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Result, Status, status_of
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.system import process_env, stack_dump
from ddp_train.system.devices import resolve_device
from ddp_train.system.phase import Phases
from ddp_train.system.process import HAS_SHARED_MEMORY, keep_freed
from ddp_train.system.terminal import free_foot
from ddp_train.training.seeding import be_deterministic
from ddp_train.training.train_state import TrainState
from ddp_train.watchdog.client import FlightRecorder, WatchRequest, collective_timeout, watched, without_records, write_heartbeats

logger = logging.getLogger(__name__)


class RankEnding(NamedTuple):
    """How what the ranks were started for has ended."""

    exit_code: int
    was_stopped: bool  # in good order; a `RankProgram` that returns the exit code of a stop was not


def run_job(job: Job, attempt: JoinedAttempt, *, is_users_agent: bool = False) -> RankEnding:
    """Call the function of a `RankProgram` job; train or evaluate for any other."""
    if isinstance(job.work, RankProgram):
        return RankEnding(int(locate(job.work.function)(attempt, job)), was_stopped=False)
    restart_note.remember_run(job.continues_from)
    status = run_as_rank(job, attempt.store, attempt.rank, attempt.size, is_users_agent=is_users_agent)
    return RankEnding(EXIT_CODE_OF_STOP.get(status, DONE), was_stopped=status in EXIT_CODE_OF_STOP)


def run_as_rank(job: Job, store: Store, rank: int, size: int, *, is_users_agent: bool = False, remark: str | None = None) -> Status:
    """Train or evaluate as one of a job's ranks, and return how it ended. A failure is recorded, shown once, and ends this process.

    The store has nothing of a rank at first. `is_users_agent`: a user's torchrun is the agent; it knows nothing of runs. `remark`: to log.
    """
    started = time.monotonic()
    state = TrainState()
    phases = Phases()
    write_heartbeats(phases)
    peers: Peers | None = None
    with redirect_output(job.run_folder, rank, is_shown=not job.in_sweep) as terminal:
        if remark is not None:
            logger.warning("%s", remark)
        try:
            with watched(_watch_request(job, store, rank, size), terminal):
                world = _open_world(job, store, rank, size)
                peers = Peers.connect(world)
                stop = _make_stop(job, world, peers, terminal, is_users_agent=is_users_agent)
                with stop.listening():
                    if world.is_main:
                        AttemptCount(job.run_folder).begin()
                    with code_captured(job.run_folder, world):
                        status = _train_or_evaluate(RankRun(job=job, world=world, state=state, stop=stop, phases=phases))
                    end_compilers()
        except BaseException as error:  # sys.exit in a component is no way to leave either
            if rank == 0:
                free_foot(terminal.fileno())
            code = report_failure(error, job, state, peers, terminal, rank=rank, started=started)
            os._exit(code)  # not sys.exit: other ranks wait in a collective, and a tidy end would wait for them
    if status in EXIT_CODE_OF_STOP:
        stop.end_agent()
    return status


def _watch_request(job: Job, store: Store, rank: int, size: int) -> WatchRequest | None:
    """Name this process to the watchdog of its machine, and return what that watches; None: this rank does not run it."""
    stack_dump.dump_on_request()  # before others know this process, and may ask for its stacks
    store.set(f"watch/{rank}", str(os.getpid()))
    if process_env.local_rank() != 0 or not HAS_SHARED_MEMORY:  # else a process cannot see what another one does
        return None
    ranks = range(rank, rank + process_env.local_world_size())  # torchrun counts a machine's ranks one after another
    deadline = time.monotonic() + MEET_WITHIN_S
    settings = job.config.cluster
    return WatchRequest(
        run_folder=str(job.run_folder.root),
        pids=[(watched, int(wait_for(store, f"watch/{watched}", within_s=deadline - time.monotonic()))) for watched in ranks],
        world_size=size,
        start_timeout_s=settings.start_timeout_s,
        step_timeout_s=settings.step_timeout_s,
        uses_device=resolve_device(settings.device) == "cuda",
        is_shown=not job.in_sweep,
    )


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
        from ddp_train.loader.worker_pool import start_server

        start_server()
    timeout = collective_timeout(config.cluster.start_timeout_s, config.cluster.step_timeout_s)
    world = open_world(store, rank, size, device=device, timeout=timeout)
    if recorder is not None:
        recorder.hide_pipe(is_expected=world.has_group)
    return world


def _make_stop(job: Job, world: World, peers: Peers, terminal: TextIO, *, is_users_agent: bool) -> Stop:
    return Stop(
        world=world,
        peers=peers,
        on_untrained_stop=partial(_record_untrained_stop, job.run_folder),
        report_lost_rank=partial(report_lost_rank, job, terminal) if is_users_agent else None,
        stops_at=None if job.in_sweep else stops_at(job.config.cluster),  # a sweep stops as a whole
        ask_stops_at=lambda: stops_at(job.config.cluster, asks_slurm=True),
        ends_agent=is_users_agent,
    )


def _record_untrained_stop(run_folder: RunFolder, number: signal.Signals) -> None:
    """Record and print that a stop came before the first step (rank 0)."""
    AttemptCount(run_folder).finish(is_saved=False)
    if not run_folder.is_completed():
        Result(status=status_of(number)).write(run_folder.result)
    print(summary.stopped(run_folder, None), flush=True)


def _train_or_evaluate(run: RankRun) -> Status:
    """Do the work of a job; a plain run imports that of no other."""
    if isinstance(run.job.work, Evaluation):
        from ddp_train.rank.evaluate_job import evaluate_job

        return evaluate_job(run, run.job.work)  # it asks for no stop, which ends the ranks at once
    return train_job(run)


def end_compilers() -> None:
    """End the processes in which inductor compiles. Torch does it in an exit handler, and no rank runs those (`exit_at_once`)."""
    if (pools := sys.modules.get("torch._inductor.async_compile")) is not None:
        pools.shutdown_compile_workers()
