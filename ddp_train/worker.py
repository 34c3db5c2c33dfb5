"""What each rank does: process group -> the same config on every rank -> seed -> build -> resume -> train -> result.

A worker is the rank itself for a single run, and the rank's `Member` for a sweep, whose jobs run in processes forked from it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from torch.distributed import DistError, PrefixStore, Store

from ddp_train import checkpoint, environment, failure, summary
from ddp_train.app import Place
from ddp_train.app import run as compose_and_run
from ddp_train.build import Components, build, build_writers
from ddp_train.devices import resolve_device
from ddp_train.distributed import World, join_store, open_world, wait_for
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import MetricWriter
from ddp_train.isolation import Baseline
from ddp_train.job import JOB_VARIABLE, Job
from ddp_train.launch.warm_group import GROUP_VARIABLE
from ddp_train.log import rank_log
from ddp_train.member import Leader, Member, serve
from ddp_train.process import die_with_parent
from ddp_train.run_dir import write_json
from ddp_train.state import TrainState, seed_all
from ddp_train.trainer import Loop, Record, settle, train

logger = logging.getLogger(__name__)

_FAILED = 1
_PEER_REPORTS_S = 5.0
_COMMAND_KEY, _SWEEP, _NOTHING = "ddp_train/command", "sweep", "nothing"


def main() -> int:
    """Serve the one job that `ddp-train` composed, the jobs of its sweep, or else what the command line asks for. Every rank runs this.

    Global rank 0 alone lets Hydra compose; the other ranks compose nothing.
    """
    die_with_parent()
    # DDP says this of every convolution with one input channel, whose strides are ambiguous; nothing is slower for it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not drown the failure's screen
    store, rank, size = join_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if JOB_VARIABLE in os.environ:
        return Rank(store, rank, size).run(Job.from_json(os.environ[JOB_VARIABLE]))
    if GROUP_VARIABLE in os.environ:
        member = Member(store, rank=rank, size=size, run_jobs=_serve_jobs)
        return serve(Leader(member, store), Path(os.environ[GROUP_VARIABLE])) if rank == 0 else member.follow()
    group = _TorchrunGroup(store, rank, size)
    if rank != 0:
        return group.follow()
    try:
        return compose_and_run(Place(run=group.run, slots=group.slots))
    finally:
        group.end()


def leave(code: int) -> NoReturn:
    """End this rank now that everything is written.

    Without destroying the process group and without C++'s destructors: where gloo's threads are still running then, they abort the process
    ("terminate called without an active exception", one run in twenty with four ranks), and a run that is done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


class _TorchrunGroup:
    """The ranks that a user's torchrun started. Rank 0 says in the store what they are for: one run, a sweep, or nothing (`--help`)."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._leader: Leader | None = None
        self._is_announced = False

    def run(self, job: Job) -> int:
        """Announce a run to the other ranks and run it with them (rank 0)."""
        text = job.to_json()
        self._announce(text)
        return Rank(self._store, self._rank, self._size).run(Job.from_json(text))  # what the others receive, to the letter

    def slots(self, agent_logs: Path, count: int) -> list[Leader]:
        """Announce a sweep, and return the one place where its jobs run: this group (rank 0)."""
        if count > 1:
            raise ConfigError(
                key="sweep.parallel_jobs",
                happened=f"is {count}, but torchrun started one group of processes",
                expected="1 under torchrun",
                fix=f"ddp-train -m ... sweep.parallel_jobs={count}",
            )
        self._announce(_SWEEP)
        self._leader = Leader(self._member(), self._store)
        return [self._leader]

    def end(self) -> None:
        """Tell the other ranks that nothing comes any more (rank 0)."""
        if self._leader is not None:
            self._leader.leave()
        elif not self._is_announced:
            self._announce(_NOTHING)

    def follow(self) -> int:
        """Take part in what rank 0 announces (other ranks)."""
        announced = wait_for(self._store, _COMMAND_KEY)
        if announced == _NOTHING:
            return 0
        if announced == _SWEEP:
            return self._member().follow()
        return Rank(self._store, self._rank, self._size).run(Job.from_json(announced))

    def _announce(self, text: str) -> None:
        self._is_announced = True
        self._store.set(_COMMAND_KEY, text)

    def _member(self) -> Member:
        return Member(self._store, rank=self._rank, size=self._size, run_jobs=_serve_jobs)


def _serve_jobs(next_job: Callable[[], Job | None], report: Callable[[int], None], generation: int) -> None:
    """Run jobs as one rank of a worker group, each as if it were the first."""
    store = PrefixStore(f"generation_{generation}", join_store())
    rank = Rank(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    baseline = Baseline()
    while (job := next_job()) is not None:
        exit_code = rank.run(job)
        baseline.restore()
        report(exit_code)


class Rank:
    """This process as one rank. The process group opens with its first job, and serves those that follow."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._world: World | None = None

    def run(self, job: Job) -> int:
        """Run one job on this rank and return its exit code. Whatever goes wrong is recorded, shown once, and ends this rank."""
        with rank_log(job.run_dir, self._rank, shows=not job.in_sweep) as terminal:
            state = TrainState()
            started = time.monotonic()
            try:
                if self._world is None:
                    self._world = open_world(
                        self._store, self._rank, self._size, device=resolve_device(job.config.tree["cluster"]["device"])
                    )
                run_job(job, self._world, state)
            except (Exception, SystemExit) as error:  # sys.exit in a component is no way to leave either
                self._fail(error, job, state, terminal, seconds=time.monotonic() - started)
        return 0

    def _fail(self, error: BaseException, job: Job, state: TrainState, terminal: TextIO, *, seconds: float) -> NoReturn:
        logger.exception("rank %d failed", self._rank)
        if _comes_from_a_peer(error):
            error.add_note("Another rank ended without a report and broke the connection: see the logs of the other ranks.")
            time.sleep(_PEER_REPORTS_S)  # whoever broke the connection knows why, or the agent does; it ends us meanwhile
        found = failure.from_exception(error, rank=self._rank, step=state.step or None)
        try:
            is_first = found.record(job.run_dir, seconds=seconds)
        except OSError:  # a full disk, say, which may be the very failure
            is_first = True
        if is_first and not job.in_sweep:
            print(found.screen(job.run_dir), file=terminal, flush=True)
        os._exit(_FAILED)  # not sys.exit: other ranks wait in a collective, and a tidy end would wait for them


def _comes_from_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank went away: then this rank is not the one to blame."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def run_job(job: Job, world: World, state: TrainState) -> None:
    """Run one job to its end; result.json has what came of it. Collective.

    Args:
        state: advanced in place, so that a caller can say how far a failed run got.
    """
    started = time.monotonic()
    tree, run_dir = job.config.tree, job.run_dir
    if world.size != job.config.batch.world_size:
        raise UserError(key="cluster", happened=f"{world.size} ranks were started for a run of {job.config.batch.world_size}")
    environment.record(job, world)
    if world.is_main:
        print(summary.opening(job, world), flush=True)
    components = build(tree, job.config.batch, world)
    _resume(job, components, state, world)
    if world.is_main:
        print(summary.plan(components, state), flush=True)
    if state.step >= components.total_steps and world.from_main(run_dir.is_completed()):
        if world.is_main:
            print("all steps are done already; a larger trainer.max_steps or trainer.max_epochs would continue", flush=True)
        return
    if world.is_main:
        run_dir.result.unlink(missing_ok=True)  # of an attempt with fewer steps: a run that looks done must be done
    writers = (
        build_writers(tree["metrics"], run_dir=str(run_dir.root), config=tree, step=state.step, total_steps=components.total_steps)
        if world.is_main
        else []
    )
    loop = Loop(
        log_every_steps=tree["trainer"]["log_every_steps"],
        evaluate_every_steps=tree["trainer"]["evaluate_every_steps"],
        checkpoint_every_steps=tree["checkpoint"]["every_steps"],
        clip_grad_norm=tree["trainer"]["clip_grad_norm"],
        write=lambda record: _write(writers, record),
        save=lambda window: checkpoint.save(
            run_dir.checkpoints,
            components,
            state,
            window.sums(),
            world,
            keep_last=tree["checkpoint"]["keep_last"],
            config_hash=job.config.hash(),
        ),
    )
    train(components, state, world, loop)
    world.barrier()  # every rank is through: only now it is completed
    result = {
        "status": "completed",
        "step": state.step,
        "epoch": round(state.samples / components.train_loader.order.epoch_size, 4),
        "samples": state.samples,
        "metrics": {"last": loop.last, "best": state.best},
        "headline": _headline(components),
        "seconds": round(time.monotonic() - started, 3),
    }
    if world.is_main:
        for writer in writers:
            writer.close()
        write_json(run_dir.result, result)
        print(summary.closing(job, result), flush=True)


def _headline(components: Components) -> dict[str, str]:
    """Return the metric to compare runs by, and which way is better."""
    if components.eval_loader is None:
        return {"metric": "train/loss", "goal": "min"}
    name, goal = next(iter(components.objective.goals.items()))
    return {"metric": f"eval/{name}", "goal": goal}


def _write(writers: list[MetricWriter], record: Record) -> None:
    for writer in writers:
        writer.write(record)
    logger.info("%s", record)


def _resume(job: Job, components: Components, state: TrainState, world: World) -> None:
    """Continue from the given or the newest good checkpoint, if there is one. Rank 0 chooses. Collective."""
    chosen = world.from_main(_choose_checkpoint(job) if world.is_main else None)
    if chosen is None:
        if world.is_main and job.run_dir.metrics.exists():
            print("resumed  from the start: there is no checkpoint yet", flush=True)
        return
    if world.is_main:
        for name in checkpoint.set_aside_after(chosen):
            print(f"a checkpoint of a later step is now {name}", flush=True)
    settle(components, world)
    if not checkpoint.load(chosen, components, state, world):
        seed_all(job.config.tree["seed"] + state.step, rank=world.rank)  # another number of ranks: new streams, not those of step 0 again


def _choose_checkpoint(job: Job) -> Path | None:
    if job.checkpoint is not None:
        given = Path(job.checkpoint)
        if problem := checkpoint.verify(given):
            raise UserError(key="resume", happened=f"{given}: {problem}", expected="a checkpoint that is complete and undamaged")
        return given
    found, refused = checkpoint.newest_good(job.run_dir.checkpoints)
    for line in refused:
        print(line, flush=True)
    return found
