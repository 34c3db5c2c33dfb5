"""One job on one rank, from its config to result.json: build -> resume -> train -> result.

`rank` has opened the process group for it, and takes care of what goes wrong.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ddp_train.config import auto
from ddp_train.config.batch_sizes import MICRO_BATCH
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import answers_before, record_answers
from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.interfaces import MetricWriter
from ddp_train.interfaces.run import WriterFacts
from ddp_train.launch.job import Job
from ddp_train.launch.restart_note import remember_run
from ddp_train.loader.order import epochs
from ddp_train.rank import summary
from ddp_train.rank.provenance import record_environment
from ddp_train.rank.stop import WALLTIME, Stop
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.progress import live_notes
from ddp_train.run_folder.result import Result, Status, status_of
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.times import read_goodput
from ddp_train.system import process_env
from ddp_train.system.phase import Phase, Phases
from ddp_train.training.build.build import build
from ddp_train.training.build.make import make_writers
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.check.memory import estimate_checkpoint
from ddp_train.training.check.rehearsal import rebuild_buckets
from ddp_train.training.loop.hooks import RunServices
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.record import predictions
from ddp_train.training.record.records import Records, run_event
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.checkpoints import Checkpoints, discard_later, probe_room, ranking_of, resumed_checkpoint, retention
from ddp_train.training.state.data_identity import known_meaning, require_alike, require_same_data, require_same_meaning
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One job on one rank, in an open process group: what each function of this module needs."""

    job: Job
    world: World
    state: TrainState  # advanced in place, so that the report of a failure can say how far the run got
    stop: Stop
    phases: Phases
    started_monotonic: float = field(default_factory=time.monotonic)


class TrainingEnd(NamedTuple):
    is_done: bool  # all steps; else it was stopped
    unsaved: str | None  # why the state after the last step is not saved; None: it is


def train_job(run: RankRun) -> Status:
    """Train to the end or to a stop, write result.json, and return the run's status. Collective."""
    run = with_known_micro_batch(run)
    components = build_components(run)
    data_changes = begin_or_resume(run, components)
    if end_if_completed(run, components):
        return Status.COMPLETED
    trainer = prepare_trainer(run, components, data_changes)
    return finish_run(run, trainer, train(run, trainer))


def with_known_micro_batch(run: RankRun) -> RankRun:
    """Return the run with the micro-batch that it measured for `auto` when it began, if it did: it keeps the first one. Collective."""
    job = run.job
    answers = run.world.from_main(lambda: answers_before(job.config, job.run_folder.root)) if job.config.batch.is_open else {}
    if MICRO_BATCH not in answers:
        return run
    return replace(run, job=replace(job, config=job.config.with_micro_batch(answers[MICRO_BATCH])))


def build_components(run: RankRun) -> Components:
    """Print what begins, and build its components. Collective."""
    job, world = run.job, run.world
    sweep = _sweep_of(job.run_folder)
    record_environment(job, world)
    if world.is_main:
        print(summary.opening(job, world), flush=True)
    components = build(job.config, world, compile_cache=(sweep or job.run_folder.root) / job.run_folder.compiled.name)
    require_alike(components.data_identity, world)
    if world.is_main:
        record_answers(job.run_folder.config, job.config, components.answers)
    return components


def _sweep_of(run_folder: RunFolder) -> Path | None:
    """Return the folder of the sweep that a run belongs to; None: it belongs to none. A run of its own does not import what reads one."""
    if not any(map(is_sweep, run_folder.root.parents)):
        return None
    from ddp_train.run_folder.sweep import sweep_of

    return sweep_of(run_folder.root)


def begin_or_resume(run: RankRun, components: Components) -> list[str]:
    """Let the run go on from a checkpoint, or begin; return how its data has changed since, if that was accepted. Collective."""
    retention(run.job.config.checkpoint, components)  # before anything is changed: it may refuse
    checkpoint, data_changes = _choose_checkpoint(run, components)
    _load(run, components, checkpoint)
    if run.job.checkpoint is not None:
        _forget_named_checkpoint(run)
    if run.world.is_main:
        print(summary.plan(run.job, components, run.state), flush=True)
    return data_changes


def _choose_checkpoint(run: RankRun, components: Components) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from (None: the run begins), and how the data has changed since; set later ones aside. Collective."""
    job, world = run.job, run.world
    checkpoint = resumed_checkpoint(job.run_folder, job.checkpoint, world, on_progress=run.phases.report_progress)
    data_changes = require_same_data(checkpoint, components.data_identity, world, job.config) if checkpoint else []
    if world.is_main:
        discard_later(job.run_folder, checkpoint, world)
    return checkpoint, data_changes


def _load(run: RankRun, components: Components, checkpoint: Path | None) -> None:
    """Load the checkpoint into the components and the state; None: the run begins, with the weights of `init_from` if any. Collective."""
    config, world, state = run.job.config, run.world, run.state
    if checkpoint is None:
        if config.init_from is not None:
            _load_initial_weights(config, Path(config.init_from), components, world)
        components.strategy.start_training(components.trained_module, {}, weights_are_equal=True)
        return
    rebuild_buckets(components, world)
    if not start_from(checkpoint, components, state, world, on_progress=run.phases.report_progress):
        seed_all(config.seed + state.step, rank=world.rank)  # new ones, not those of step 0 again
    if state.early_end is not None and not state.early_end.holds(config.callbacks):
        state.early_end = None  # asked of a callback that is not there any more, or not as it was


def _forget_named_checkpoint(run: RankRun) -> None:
    """Let later starts resume from the newest checkpoint: the one that a person named for this start is loaded."""
    run_folder = run.job.run_folder
    remember_run(run_folder.root)
    if run.world.is_main and run_folder.launch.is_dir():  # also for the next start of what was submitted
        run_folder.continued.touch()


def _load_initial_weights(config: RunConfig, weights: Path, components: Components, world: World) -> None:
    """Load the weights that `init_from` names, and print which. Collective."""
    from ddp_train.training.state.initial_weights import load_initial_weights

    if config.init_from_strict and world.is_main:
        meaning = components.data_identity["meaning"]
        changes = require_same_meaning(meaning, known_meaning(weights), key="init_from", accepted=config.accept_changed_data)
        world.print(*(f"{line}; accepted" for line in changes))
    world.print(*load_initial_weights(weights, components.model, world, renames=config.init_from_keys, is_strict=config.init_from_strict))


def end_if_completed(run: RankRun, components: Components) -> bool:
    """End a run that an earlier attempt has completed; return whether it is such a run. Collective."""
    if not run.state.is_over(components.total_steps) or not run.world.from_main(run.job.run_folder.is_completed):
        return False
    if run.world.is_main:
        AttemptCount(run.job.run_folder).finish()
        print(summary.over(run.job, run.state), flush=True)
    return True


def prepare_trainer(run: RankRun, components: Components, data_changes: list[str]) -> Trainer:
    """Return the trainer of a run that has begun or resumed, and let rank 0 make room for what this attempt writes. Collective.

    `data_changes`: of `begin_or_resume`, for an event.
    """
    keep = retention(run.job.config.checkpoint, components)
    if run.world.is_main:
        _clear_for_attempt(run, components)
    records = Records(run.job.run_folder, run.world, partial(_writers, run, components) if run.world.is_main else list)
    if data_changes:
        records.log_event(run_event("data_changed", run.state.step, changes=data_changes), "")
    checkpoints = Checkpoints(
        config=run.job.config,
        run_folder=run.job.run_folder,
        components=components,
        state=run.state,
        world=run.world,
        keep=keep,
        records=records,
        phases=run.phases,
        ask_to_save=run.stop.ask_to_save,
    )
    services = RunServices(
        run_folder=run.job.run_folder,
        phases=run.phases,
        records=records,
        checkpoints=checkpoints,
        stop=run.stop,
        started_at=time.time() - (time.monotonic() - run.started_monotonic),
    )
    return build_trainer(run.job.config, components, run.state, run.world, services)


def _clear_for_attempt(run: RankRun, components: Components) -> None:
    """Make sure that the disk has room, and remove what this attempt writes again (rank 0; the others wait at the next collective)."""
    run_folder = run.job.run_folder
    probe_room(run_folder.checkpoints, estimate_checkpoint(components, num_ranks=run.world.size))
    run_folder.result.unlink(missing_ok=True)  # of an attempt with fewer steps: a run that looks done must be done
    predictions.forget_after(run_folder.predictions, run.state.step)


def _writers(run: RankRun, components: Components) -> list[MetricWriter]:
    """Return the metric writers for the records after this step (rank 0)."""
    job, state, config = run.job, run.state, run.job.config
    run_name = ""
    if (sweep := _sweep_of(job.run_folder)) is not None:
        from ddp_train.run_folder.sweep import Sweep

        run_name = Sweep.load(sweep).name(job.run_folder.root)
    facts = WriterFacts(
        run_dir=str(job.run_folder.root),
        config=auto.with_answers(config.tree, "", {key: auto.yaml_value(value) for key, value in components.answers.items()}),
        hyper_parameters=job.hyper_parameters(),
        run_name=run_name,
        step=state.step,
        total_steps=components.total_steps,
        phases=run.phases,
        epoch=epochs(components.train_loader.order, state.position),
        steps_per_epoch=components.train_loader.order.steps_per_epoch,
        notes=lambda: live_notes(
            job.run_folder, {metric: (best.value, best.step) for metric, best in state.best.items()}, restarts=process_env.restart_count()
        ),
    )
    return make_writers(config.metrics, facts)


def train(run: RankRun, trainer: Trainer) -> TrainingEnd:
    """Train until all steps are done, or to a stop; finish the last save. Collective."""
    if faults := run.job.config.debug.faults:
        from ddp_train.rank.fault_injection import inject

        inject(faults, run.phases, trainer.components, run.world, run.job.run_folder)
    run.stop.begin_training(run.state.steps_run)
    is_done = trainer.train()
    unsaved = trainer.services.checkpoints.finish()  # before `end`, which writes a profile: a stop leaves little time
    if unsaved and is_done:
        happened = f"all steps are done, but the last one was not saved. {unsaved}"
        fix = "free disk space, or raise `ulimit -f` if a file is too large; then `ddp-train resume` continues from the checkpoint before"
        raise RunError(key="checkpoint", happened=happened, expected="the state of the last step on disk", fix=fix)
    return TrainingEnd(is_done, unsaved)


def finish_run(run: RankRun, trainer: Trainer, end: TrainingEnd) -> Status:
    """Write result.json, print how the run ended, and return its status. Collective."""
    status = Status.COMPLETED if end.is_done else status_of(run.stop.cause())
    run.phases.enter(Phase.END, run.state.step)
    run.world.barrier()  # every rank is through: only now it is completed
    trainer.end(status)
    if run.world.is_main:
        _write_result(run, trainer, status, unsaved=end.unsaved)
    run.world.barrier()  # no rank leaves before it is written: a signal then would look like one after a failure
    return status


def _write_result(run: RankRun, trainer: Trainer, status: Status, *, unsaved: str | None) -> None:
    """Write result.json, and print how the run ended (rank 0)."""
    job, state, run_folder = run.job, run.state, run.job.run_folder
    is_done = status == Status.COMPLETED
    ranking = ranking_of(trainer.components)
    result = Result(
        status=status,
        step=state.step,
        epoch=epochs(trainer.components.train_loader.order, state.position),
        samples=state.position,
        metrics={"last": trainer.services.records.last_values, "best": {metric: asdict(best) for metric, best in state.best.items()}},
        headline={"metric": ranking.metric, "goal": ranking.goal},
        seconds=round(time.monotonic() - run.started_monotonic, 3),
        early_end=str(state.early_end) if state.early_end is not None and is_done else None,
    )
    try:
        trainer.services.records.close()
        result = replace(result, goodput=read_goodput(run_folder))
        result.write(run_folder.result)
        AttemptCount(run_folder).finish(is_saved=not unsaved)
    except OSError as error:  # a full disk: a stop goes on, and the last checkpoint counts
        happened = f"{run_folder.as_typed()} cannot be written: {error.strerror}"
        if is_done:
            expected = "room for the last lines of metrics.jsonl and for result.json"
            fix = "free disk space; then `ddp-train resume` writes them"
            raise RunError(happened=f"all steps are done, but {happened}", expected=expected, fix=fix) from None
        print(happened, flush=True)
    if is_done:
        print(summary.closing(job, state, result), flush=True)
    else:
        if run.stop.cause() is WALLTIME:
            print(f"the walltime ends in cluster.grace_s={job.config.cluster.grace_s} s", flush=True)
        print(summary.stopped(run_folder, result.step, unsaved=run_folder.resume_point_text() if unsaved else ""), flush=True)
