"""What each rank does: process group -> the same config on every rank -> seed -> build -> resume -> train -> result.

One job after another in a sweep; `group` says which.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch.distributed import DistError, Store

from ddp_train import (
    checkpoint,
    checkpoint_policy,
    checkpoint_probe,
    cluster,
    environment,
    failure,
    init_from,
    memory,
    predictions,
    progress,
    restart,
    summary,
)
from ddp_train.anomaly import AnomalyWatch, Event, Rewind
from ddp_train.build import Components, build, build_writers
from ddp_train.checkpoint_policy import Keep, Ranking, Schedule, ranking
from ddp_train.data.order import epochs
from ddp_train.data.workers import start_server
from ddp_train.devices import resolve_device
from ddp_train.distributed import World, open_world
from ddp_train.errors import RunError, UserError
from ddp_train.exit_code import DONE, FINAL, STOPPED
from ddp_train.faults import inject
from ddp_train.interfaces import MetricWriter
from ddp_train.job import JOB_VARIABLE, Job
from ddp_train.log import rank_log
from ddp_train.process import exit_code_of
from ddp_train.pulse import Phase, Pulse
from ddp_train.redaction import redact_all
from ddp_train.replica import FingerprintCheck, ReplicaCheck
from ddp_train.rewind import rewind
from ddp_train.run_dir import RunDir, write_json
from ddp_train.state import TrainState, be_deterministic, seed_all
from ddp_train.step_guard import SkippingGuard, StepGuard
from ddp_train.stop import WALLTIME, Stop
from ddp_train.trainer import Loop, Record, settle, train
from ddp_train.watch import Watch, flight_recorder, patience

logger = logging.getLogger(__name__)

_PEER_REPORTS_S = 5.0
_AGENT_ACTS_S = 0.5  # after it has seen a rank end of something else than exit code 0


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
        self._watch = Watch(store, rank, size)

    def run(self, job: Job) -> int:
        """Run one job on this rank and return its exit code. Whatever goes wrong is recorded, shown once, and ends this rank."""
        self._num_jobs += 1
        with rank_log(job.run_dir, self._rank, shows=not job.in_sweep) as terminal:
            state = TrainState()
            started = time.monotonic()
            stop: Stop | None = None
            try:
                tree, pulse = job.config.tree, Pulse()
                device = resolve_device(tree["cluster"]["device"])
                self._watch.begin(job, pulse, uses_device=device == "cuda", terminal=terminal)
                # Of ranks that a user's torchrun started, and before CUDA is.
                os.environ.update(cluster.environment_of(tree["cluster"], deterministic=tree["deterministic"]))
                os.environ.update(flight_recorder(job.run_dir) if device == "cuda" else {})
                if job.config.tree["data"]["num_workers"]:
                    start_server()
                if self._world is None:
                    self._world = open_world(self._store, self._rank, self._size, device=device, timeout=patience(tree["cluster"]))
                self._world.use_device()
                stop = Stop(
                    self._world,
                    name=f"{self._num_jobs}",
                    leave=lambda number: _leave_untrained(job.run_dir, number),
                    report=None
                    if JOB_VARIABLE in os.environ or job.in_sweep
                    else lambda rank, pid, doing: _show(failure.from_loss(rank=rank, pid=pid).beside(doing), job, terminal),
                    at=None if job.in_sweep else _stops_at(tree["cluster"]),  # a sweep stops as a whole
                )
                if self._world.is_main:
                    pulse.listen(progress.begin(job.run_dir))
                code = run_job(job, self._world, state, stop, pulse)
                self._watch.end()
                stop.close()
                return code
            except BaseException as error:  # sys.exit in a component is no way to leave either
                logger.exception("rank %d failed", self._rank)
                found = _describe(error, job, state, stop, rank=self._rank)
                _show(found, job, terminal, seconds=time.monotonic() - started)
                first = failure.load(job.run_dir) or found  # on another machine there is an agent that knows no other reason
                os._exit(first.exit_code)  # not sys.exit: other ranks wait in a collective, and a tidy end would wait for them


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
        gone = _wait_for_a_report(job, stop)
        if stop is not None and gone is not None:
            departed, pid = gone
            doing = stop.ask_others() | {rank: failure.describe_error(error, is_a_peers=True)}
            return failure.from_departure(rank=departed, pid=pid, step=state.step).beside(doing)
    found = failure.from_exception(error, rank=rank, step=state.step or None)
    return found if stop is None or job.run_dir.failure.exists() else found.beside(stop.ask_others())


def _wait_for_a_report(job: Job, stop: Stop | None) -> tuple[int, int] | None:
    """Give whoever broke the connection, or the agent that saw it end, time to say why; it ends this rank meanwhile.

    Returns:
        Rank and pid of a neighbour that left with exit code 0, in which no agent finds anything wrong.
    """
    deadline, reaped = time.monotonic() + _PEER_REPORTS_S, 0.0
    while time.monotonic() < deadline and not job.run_dir.failure.exists():
        time.sleep(0.005)
        gone = stop.gone() if stop is not None and not job.in_sweep else None  # in a sweep its member knows how it ended
        if gone is None:
            continue
        exit_code = exit_code_of(gone[1])
        reaped = reaped or (time.monotonic() if exit_code is None else 0.0)
        if exit_code == 0 or (reaped and time.monotonic() - reaped > _AGENT_ACTS_S):
            return gone
    return None


def _show(found: failure.Failure, job: Job, terminal: TextIO, *, seconds: float = 0.0) -> None:
    """Record a failure, and show it unless another one was earlier. A sweep shows its jobs' failures itself."""
    try:
        is_first = found.record(job.run_dir, seconds=seconds)
    except OSError:  # a full disk, say, which may be the very failure
        is_first = True
    if is_first and not job.in_sweep and (restart.is_last_attempt() or found.exit_code in FINAL):
        print(found.screen(job.run_dir), file=terminal, flush=True)


def _stops_at(section: Mapping[str, Any]) -> float | None:
    return cluster.stops_at(section, os.environ, started=memory.run_started(), now=time.time())


def _leave_untrained(run_dir: RunDir, number: signal.Signals) -> None:
    """Say that a stop came before the first step (rank 0)."""
    progress.end(run_dir, is_saved=False)
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
    keep = _keep(tree["checkpoint"], components)
    if not _resume(job, components, state, world) and tree["init_from"] is not None:
        lines = init_from.load(
            Path(tree["init_from"]), components.model, world, renames=tree["init_from_keys"], is_strict=tree["init_from_strict"]
        )
        if world.is_main:
            print(*lines, sep="\n", flush=True)
    if job.checkpoint is not None:
        memory.remember(run_dir.root)  # the checkpoint has been loaded: from now on the newest one counts
    if world.is_main:
        print(summary.plan(components, state), flush=True)
    if state.step >= components.total_steps and world.from_main(run_dir.is_completed()):
        if world.is_main:
            progress.end(run_dir)
            print("all steps are done already; a larger trainer.max_steps or trainer.max_epochs would continue", flush=True)
        return DONE
    if world.is_main:
        _probe(run_dir, components, keep, world)  # the other ranks wait for it in `_loop`
        run_dir.result.unlink(missing_ok=True)  # of an attempt with fewer steps: a run that looks done must be done
        predictions.forget_after(run_dir.predictions, state.step)
    writers = _writers(job, components, state, world)
    saver, schedule = _saver(job, world, keep), _schedule(job, state, world, stop, keep)
    loop = _loop(job, components, state, world, stop, pulse, writers, saver, schedule)
    inject(tree["debug"]["faults"], pulse, components, world, run_dir)
    stop.can_save()
    is_done = train(components, state, world, loop)
    unsaved = saver.finish()
    if unsaved and is_done:
        raise RunError(
            key="checkpoint",
            happened=f"all steps are done, but the last one was not saved. {unsaved}",
            expected="the state of the last step on disk",
            fix="make room, and `ddp-train resume` the run: it continues from the checkpoint before",
        )
    pulse.enter(Phase.END, state.step)
    world.barrier()  # every rank is through: only now it is completed
    status = "completed" if is_done else _status(stop.cause())
    if world.is_main:
        for writer in writers:
            writer.close()
        result = _result(status, components, state, loop, seconds=time.monotonic() - started)
        write_json(run_dir.result, result)
        progress.end(run_dir)
        if not is_done and stop.cause() is WALLTIME:
            print(f"the time is up but for cluster.grace_s={tree['cluster']['grace_s']} s", flush=True)
        place = checkpoint.place(run_dir.checkpoints) if unsaved else ""
        print(summary.closing(job, result) if is_done else summary.stopped(run_dir, state.step, unsaved=place), flush=True)
    world.barrier()  # nobody leaves before it is written: a signal then would look like one after a failure
    return STOPPED.get(status, DONE)


def _writers(job: Job, components: Components, state: TrainState, world: World) -> list[MetricWriter]:
    """Return where the numbers go from this step on; nowhere on other ranks than 0."""
    if not world.is_main:
        return []
    tree = job.config.tree
    return build_writers(tree["metrics"], run_dir=str(job.run_dir.root), config=tree, step=state.step, total_steps=components.total_steps)


def _saver(job: Job, world: World, keep: Keep) -> checkpoint.Saver:
    """Return what writes the run's checkpoints. Collective."""
    tree = job.config.tree["checkpoint"]
    return checkpoint.Saver(
        job.run_dir.checkpoints,
        world,
        config_hash=job.config.hash(),
        asynchronous=tree["asynchronous"],
        remove_old=lambda folder: checkpoint.remove_old(folder, keep),
    )


def _schedule(job: Job, state: TrainState, world: World, stop: Stop, keep: Keep) -> Schedule:
    """Return what says after which steps the run is saved. Collective."""
    tree, folder = job.config.tree["checkpoint"], job.run_dir.checkpoints
    return Schedule(
        every_steps=tree["every_steps"],
        every_minutes=tree["every_minutes"],
        keep=keep,
        saved=world.from_main(checkpoint_policy.saved(folder) if world.is_main else None),
        agree=lambda step, is_due: stop.saves_after(state.steps_taken, is_due),  # which only grows, also over a rewind
    )


def _loop(
    job: Job,
    components: Components,
    state: TrainState,
    world: World,
    stop: Stop,
    pulse: Pulse,
    writers: list[MetricWriter],
    saver: checkpoint.Saver,
    schedule: Schedule,
) -> Loop:
    """Tell the loop what the config, the run folder and the stop say."""
    tree, run_dir = job.config.tree, job.run_dir
    trainer, every = tree["trainer"], tree["trainer"]["check_replicas_every_steps"]

    def tell(event: Event, line: str) -> None:
        if world.is_main:
            with run_dir.events.open("a") as file:
                file.write(json.dumps(event) + "\n")
            if line:
                print(line, flush=True)

    def go_back(found: Rewind) -> None:
        pulse.enter(Phase.START, state.step)  # reading a checkpoint takes its time
        saver.finish()
        rewind(found, run_dir, components, state, world, tell=tell)
        for writer in writers:
            writer.close()
        writers[:] = _writers(job, components, state, world)  # which drop what they had after this step

    def write(record: Record) -> None:
        schedule.note(record)
        _write(writers, record)

    return Loop(
        log_every_steps=tree["trainer"]["log_every_steps"],
        evaluate_every_steps=tree["trainer"]["evaluate_every_steps"],
        clip_grad_norm=tree["trainer"]["clip_grad_norm"],
        write=write,
        save=lambda window: saver.save(components, state, window.sums(), facts=schedule.facts(state.step)),
        saves_after=schedule.saves_after,
        stops_after=stop.comes_after,
        is_stopping=stop.is_asked,
        pulse=pulse,
        predictions_of=run_dir.predictions_of if tree["evaluate"]["save_predictions"] else None,
        watch=AnomalyWatch(**{key: trainer[key] for key in ("on_nonfinite", "spike_zscore", "on_spike")}, tell=tell),
        guard=SkippingGuard(components.model, components.optimizer) if trainer["on_nonfinite"] == "skip" else StepGuard(),
        replicas=FingerprintCheck(components.model, world, every_steps=every) if every else ReplicaCheck(),
        rewind=go_back,
    )


def _keep(settings: Mapping[str, Any], components: Components) -> Keep:
    """Return which checkpoints stay; refuses a metric that the run does not measure."""
    return Keep(
        last=settings["keep_last"],
        best=settings["keep_best"],
        every_steps=settings["keep_every_steps"],
        ranking=_ranking(components, settings["metric"]),
    )


def _probe(run_dir: RunDir, components: Components, keep: Keep, world: World) -> None:
    """Refuse to train what could not be saved, or say that it will be tight (rank 0)."""
    size = checkpoint_probe.estimate(components.model, components.optimizer, num_ranks=world.size)
    if warning := checkpoint_probe.probe(run_dir.checkpoints, size, wanted=keep.last + keep.best + 1):
        print(warning, flush=True)


def _result(status: str, components: Components, state: TrainState, loop: Loop, *, seconds: float) -> dict[str, Any]:
    """Return what result.json holds."""
    return {
        "status": status,
        "step": state.step,
        "epoch": epochs(components.train_loader.order, state.samples),
        "samples": state.samples,
        "metrics": {"last": loop.last, "best": state.best},
        "headline": asdict(_ranking(components)),  # the metric to compare runs by, and which way is better
        "seconds": round(seconds, 3),
    }


def _ranking(components: Components, metric: str | None = None) -> Ranking:
    return ranking(components.objective.goals, metric=metric, is_evaluated=components.eval_loader is not None)


def _write(writers: list[MetricWriter], record: Record) -> None:
    record = redact_all(record)  # a metric's name is somebody's text, and writers are anybody's
    for writer in writers:
        writer.write(record)
    logger.info("%s", record)


def _resume(job: Job, components: Components, state: TrainState, world: World) -> bool:
    """Continue from the given or the newest good checkpoint; tell whether there is one. Rank 0 chooses. Collective."""
    chosen = world.from_main(_choose_checkpoint(job) if world.is_main else None)
    if world.is_main:
        checkpoint.remove_debris(job.run_dir.checkpoints)
        for name in checkpoint.set_aside_after(chosen.parent if chosen else job.run_dir.checkpoints, chosen):
            print(f"a checkpoint of a later step is now {name}", flush=True)
    if chosen is None:
        if world.is_main and job.run_dir.metrics.exists():
            print("resumed  from the start: there is no good checkpoint", flush=True)
        return False
    settle(components, world)
    if not checkpoint.load(chosen, components, state, world):
        seed_all(job.config.tree["seed"] + state.step, rank=world.rank)  # another number of ranks: new streams, not those of step 0 again
    return True


def _choose_checkpoint(job: Job) -> Path | None:
    if job.checkpoint is not None:
        return checkpoint_policy.find(Path(job.checkpoint), checkpoint.verify, key="resume")
    found, refused = checkpoint.newest_good(job.run_dir.checkpoints)
    for line in refused:
        print(line, flush=True)
    return found
