"""What each rank does: process group -> the same config on every rank -> seed -> build -> resume -> train -> result.

One job after another in a sweep; `group` says which.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch.distributed import DistError, Store

from ddp_train import checkpoint, environment, failure, memory, predictions, restart, summary
from ddp_train.build import Components, build, build_writers
from ddp_train.cluster import environment_of
from ddp_train.data.order import epochs
from ddp_train.data.workers import start_server
from ddp_train.devices import resolve_device
from ddp_train.distributed import World, open_world
from ddp_train.errors import UserError
from ddp_train.exit_code import DONE, FAILED, STOPPED
from ddp_train.interfaces import MetricWriter
from ddp_train.job import JOB_VARIABLE, Job
from ddp_train.log import rank_log
from ddp_train.pulse import Phase, Pulse
from ddp_train.redaction import redact_all
from ddp_train.run_dir import RunDir, write_json
from ddp_train.state import TrainState, be_deterministic, seed_all
from ddp_train.stop import Stop
from ddp_train.trainer import Loop, Record, settle, train

logger = logging.getLogger(__name__)

_PEER_REPORTS_S = 5.0


def leave(code: int) -> NoReturn:
    """End this rank now that everything is written.

    Without destroying the process group and without C++'s destructors: where gloo's threads are still running then, they abort the process
    ("terminate called without an active exception", one run in twenty with four ranks), and a run that is done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


class Rank:
    """This process as one rank. The process group opens with its first job, and serves those that follow."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._world: World | None = None
        self._num_jobs = 0

    def run(self, job: Job) -> int:
        """Run one job on this rank and return its exit code. Whatever goes wrong is recorded, shown once, and ends this rank."""
        self._num_jobs += 1
        with rank_log(job.run_dir, self._rank, shows=not job.in_sweep) as terminal:
            state = TrainState()
            started = time.monotonic()
            stop: Stop | None = None
            try:
                tree = job.config.tree
                # Of ranks that a user's torchrun started, and before CUDA is.
                os.environ.update(environment_of(tree["cluster"], deterministic=tree["deterministic"]))
                if job.config.tree["data"]["num_workers"]:
                    start_server()
                if self._world is None:
                    self._world = open_world(
                        self._store, self._rank, self._size, device=resolve_device(job.config.tree["cluster"]["device"])
                    )
                self._world.use_device()
                stop = Stop(
                    self._world,
                    name=f"{self._num_jobs}",
                    leave=lambda number: _leave_untrained(job.run_dir, number),
                    report=None
                    if JOB_VARIABLE in os.environ or job.in_sweep
                    else lambda rank, pid, doing: _show(failure.from_loss(rank=rank, pid=pid).beside(doing), job, terminal),
                )
                code = run_job(job, self._world, state, stop, Pulse())
                stop.close()
                return code
            except BaseException as error:  # sys.exit in a component is no way to leave either
                logger.exception("rank %d failed", self._rank)
                found = _describe(error, job, state, stop, rank=self._rank)
                _show(found, job, terminal, seconds=time.monotonic() - started)
                os._exit(FAILED)  # not sys.exit: other ranks wait in a collective, and a tidy end would wait for them


def _comes_from_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank went away: then this rank is not the one to blame."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _describe(error: BaseException, job: Job, state: TrainState, stop: Stop | None, *, rank: int) -> failure.Failure:
    """Find out who is to blame for an error on this rank, and what the others were doing."""
    is_a_peers = _comes_from_a_peer(error)
    if stop is not None:
        stop.say(failure.describe_error(error, is_a_peers=is_a_peers), is_lost=is_a_peers)
    if is_a_peers:
        error.add_note(f"{restart.LOST}: see the logs of the other ranks.")
        time.sleep(_PEER_REPORTS_S)  # whoever broke the connection knows why, or the agent does; it ends us meanwhile
        gone = stop.gone() if stop is not None and not job.in_sweep else None  # in a sweep its member knows how it ended
        if stop is not None and gone is not None and not job.run_dir.failure.exists():  # the agent found nothing wrong with its end
            departed, pid = gone
            doing = stop.ask_others() | {rank: failure.describe_error(error, is_a_peers=True)}
            return failure.from_departure(rank=departed, pid=pid, step=state.step).beside(doing)
    found = failure.from_exception(error, rank=rank, step=state.step or None)
    return found if stop is None or job.run_dir.failure.exists() else found.beside(stop.ask_others())


def _show(found: failure.Failure, job: Job, terminal: TextIO, *, seconds: float = 0.0) -> None:
    """Record a failure, and show it unless another one was earlier. A sweep shows its jobs' failures itself."""
    try:
        is_first = found.record(job.run_dir, seconds=seconds)
    except OSError:  # a full disk, say, which may be the very failure
        is_first = True
    if is_first and not job.in_sweep and restart.is_last_attempt():
        print(found.screen(job.run_dir), file=terminal, flush=True)


def _leave_untrained(run_dir: RunDir, number: signal.Signals) -> None:
    """Say that a stop came before the first step (rank 0)."""
    if not run_dir.is_completed():
        write_json(
            run_dir.result, {"status": _status(number), "step": None, "epoch": None, "samples": None, "metrics": {}, "seconds": None}
        )
    print(summary.stopped(run_dir, None), flush=True)


def _status(number: signal.Signals) -> str:
    return "interrupted" if number == signal.SIGINT else "preempted"


def run_job(job: Job, world: World, state: TrainState, stop: Stop, pulse: Pulse) -> int:
    """Run one job to its end or to a stop; result.json has what came of it. Collective.

    Args:
        state: advanced in place, so that a caller can say how far a failed run got.
        pulse: is told what this rank is at.

    Returns:
        The exit code of `ddp-train`.
    """
    started = time.monotonic()
    tree, run_dir = job.config.tree, job.run_dir
    if world.size != job.config.batch.world_size:
        raise UserError(key="cluster", happened=f"{world.size} ranks were started for a run of {job.config.batch.world_size}")
    environment.record(job, world)
    if world.is_main:
        print(summary.opening(job, world), flush=True)
    if tree["deterministic"]:
        be_deterministic()
    components = build(tree, job.config.batch, world)
    _resume(job, components, state, world)
    if job.checkpoint is not None:
        memory.remember(run_dir.root)  # the checkpoint has been loaded: from now on the newest one counts
    if world.is_main:
        print(summary.plan(components, state), flush=True)
    if state.step >= components.total_steps and world.from_main(run_dir.is_completed()):
        if world.is_main:
            print("all steps are done already; a larger trainer.max_steps or trainer.max_epochs would continue", flush=True)
        return DONE
    if world.is_main:
        run_dir.result.unlink(missing_ok=True)  # of an attempt with fewer steps: a run that looks done must be done
        predictions.forget_after(run_dir.predictions, state.step)
    writers = (
        build_writers(tree["metrics"], run_dir=str(run_dir.root), config=tree, step=state.step, total_steps=components.total_steps)
        if world.is_main
        else []
    )
    loop = _loop(job, components, state, world, stop, pulse, writers)
    stop.can_save()
    is_done = train(components, state, world, loop)
    pulse.enter(Phase.END, state.step)
    world.barrier()  # every rank is through: only now it is completed
    status = "completed" if is_done else _status(stop.cause())
    if world.is_main:
        for writer in writers:
            writer.close()
        result = _result(status, components, state, loop, seconds=time.monotonic() - started)
        write_json(run_dir.result, result)
        print(summary.closing(job, result) if is_done else summary.stopped(run_dir, state.step), flush=True)
    world.barrier()  # nobody leaves before it is written: a signal then would look like one after a failure
    return STOPPED.get(status, DONE)


def _loop(job: Job, components: Components, state: TrainState, world: World, stop: Stop, pulse: Pulse, writers: list[MetricWriter]) -> Loop:
    """Tell the loop what the config, the run folder and the stop say."""
    tree, run_dir = job.config.tree, job.run_dir
    return Loop(
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
        stops_after=stop.comes_after,
        is_stopping=stop.is_asked,
        pulse=pulse,
        predictions_of=run_dir.predictions_of if tree["evaluate"]["save_predictions"] else None,
    )


def _result(status: str, components: Components, state: TrainState, loop: Loop, *, seconds: float) -> dict[str, Any]:
    """Return what result.json holds."""
    return {
        "status": status,
        "step": state.step,
        "epoch": epochs(components.train_loader.order, state.samples),
        "samples": state.samples,
        "metrics": {"last": loop.last, "best": state.best},
        "headline": _headline(components),
        "seconds": round(seconds, 3),
    }


def _headline(components: Components) -> dict[str, str]:
    """Return the metric to compare runs by, and which way is better."""
    if components.eval_loader is None:
        return {"metric": "train/loss", "goal": "min"}
    name, goal = next(iter(components.objective.goals.items()))
    return {"metric": f"eval/{name}", "goal": goal}


def _write(writers: list[MetricWriter], record: Record) -> None:
    record = redact_all(record)  # a metric's name is somebody's text, and writers are anybody's
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
