"""Put the trainer of a run together. Its features are chosen here, once, from what was built and what the config asks for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.world import World
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.order import BatchOrder
from ddp_train.loader.reader import MicroBatch
from ddp_train.scheduler.schedule import EveryEpoch, Plateau
from ddp_train.training.check import memory
from ddp_train.training.check.rehearsal import rebuild_buckets, restoring_state, try_step
from ddp_train.training.check.sanity_check import try_first_batches
from ddp_train.training.loop.evaluation import evaluating
from ddp_train.training.loop.hooks import Hooks, RunServices
from ddp_train.training.loop.time_record import TimeRecord
from ddp_train.training.loop.train_step import StepGuard, TrainStep
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.profile import Profiler
from ddp_train.training.record.log_window import LogWindow, Reading
from ddp_train.training.record.loss_monitor import LossMonitor
from ddp_train.training.train_state import TrainState

if TYPE_CHECKING:
    from ddp_train.training.parts.compiled import Compiled


def build_trainer(config: RunConfig, components: Components, state: TrainState, world: World, services: RunServices) -> Trainer:
    """Return the trainer of a run, with all its features. Call it after the state was loaded, or set to the run's beginning."""
    log_every, cut_off = config.trainer.log_every_steps, config.debug.max_steps
    health, records = config.health, services.records
    trainer = Trainer(
        components=components,
        state=state,
        world=world,
        train_step=_train_step(config, components, state, world),
        log_every_steps=log_every if cut_off is None else min(log_every, -(-cut_off // 20)),
        evaluate_every_steps=config.evaluation.every_steps,
        saves_predictions=config.evaluation.save_predictions,
        monitor=LossMonitor(
            on_nonfinite=health.on_nonfinite, spike_zscore=health.spike_zscore, on_spike=health.on_spike, log_event=records.log_event
        ),
        services=services,
    )
    for feature in _features(trainer, config):
        trainer.hooks.add(feature)
    return trainer


def _train_step(config: RunConfig, components: Components, state: TrainState, world: World) -> TrainStep:
    """Return the kind of step that a run takes: the plain one, one with turns, or one within backward."""
    kind = TrainStep
    if components.turns.by_name or components.steps_in_backward:
        from ddp_train.training.loop.other_steps import EarlyStep, TurnsStep

        kind = TurnsStep if components.turns.by_name else EarlyStep
    guard = StepGuard()
    if config.health.on_nonfinite == "skip":
        from ddp_train.training.loop.skip_nonfinite import SkippingGuard

        guard = SkippingGuard(components.trained_module, components.optimizer)
    return kind(components=components, state=state, world=world, clip_grad_norm=config.trainer.clip_grad_norm, guard=guard)


def _features(trainer: Trainer, config: RunConfig) -> Iterator[Hooks]:
    """Yield the hooks of each feature, which gets what it uses. At a point of the loop they are called in this order."""
    components, state, world, services = trainer.components, trainer.state, trainer.world, trainer.services
    scheduler, step_marks = components.scheduler, trainer.train_step.marks
    time_record = TimeRecord(components, state, world, services, step_marks)
    yield Hooks(when_steps_begin=[time_record.begin])  # first, and its end after that of callbacks: both are in its time
    yield _before_first_step(components, state, world, sanity_check=config.sanity_check)
    if isinstance(scheduler, EveryEpoch):
        yield _count_epochs(components.train_loader.order, state, scheduler)
    yield Hooks(after_step=[components.strategy.after_step])
    if world.device.type == "cuda":
        from ddp_train.training.loop.device_queue import DeviceQueue

        yield Hooks(after_step=[DeviceQueue(services.phases).after_step])
    replicas = None
    if every_steps := config.health.check_replicas_every_steps:
        from ddp_train.training.loop.replica_check import ReplicaCheck, hashes_of_rest

        replicas = ReplicaCheck(
            model=components.trained_module,
            world=world,
            every_steps=every_steps,
            optimizer=components.optimizer,
            others=partial(hashes_of_rest, components, state),
            strategy=components.strategy,
        )
        yield Hooks(after_step=[replicas.after_step])  # after the strategy, which may have synchronised the weights
    yield Profiler(config.profile, world, services.run_folder, services.phases, step_marks).hooks()
    if components.callbacks:
        from ddp_train.training.loop.callbacks import Callbacks

        callbacks = Callbacks(
            components, state, world, services, logged=trainer.logged, is_log_step=trainer.is_log_step, settings=config.callbacks
        )
        yield callbacks.hooks()
    if replicas is not None:
        yield Hooks(before_save=[replicas.before_save])  # after callbacks: what they change is saved, too
    if isinstance(scheduler, Plateau):  # after callbacks, which add metrics
        # rank 0's values: a last-bit difference would make the ranks' learning rates diverge
        yield Hooks(after_evaluation=[lambda metrics: scheduler.follow(world.from_main(lambda: metrics))])
    yield Hooks(at_record=[partial(_add_values, components, state, trainer.window, skips_steps=trainer.train_step.guard.skips_steps)])
    yield Hooks(add_to_reduction=[time_record.add_to], at_record=[time_record.record], at_end=[time_record.end])
    yield Hooks(after_first_step=[lambda: memory.print_memory_use(components, world)])


def _before_first_step(components: Components, state: TrainState, world: World, *, sanity_check: bool) -> Hooks:
    """Let the first micro-batch serve for all that comes before the first step."""
    hooks = Hooks()
    prepare = hooks.before_first_step
    throughput, lengths = components.throughput, components.length_plan

    def rehearse(first: MicroBatch) -> None:
        with restoring_state(components, world.device):
            rebuild_buckets(components, world, first)

    def see_shapes(first: MicroBatch) -> None:
        with batch_on(world.device, first) as batch:
            throughput.see(batch)

    def cut(micro_batch: MicroBatch) -> MicroBatch:
        if lengths is None:
            return micro_batch
        throughput.has_cut_windows = lengths.at(state.step) < lengths.whole
        return lengths.cut(micro_batch, state.step)

    if throughput.wants_batch:
        prepare.append(see_shapes)
    if sanity_check:
        prepare.append(lambda first: try_first_batches(components, first, world, state.position))
    has_lasting_buckets = components.strategy.has_buckets and (components.turns.by_name or components.zeroes_gradients_in_place())
    if state.step == 0 and world.size > 1 and has_lasting_buckets:
        prepare.append(rehearse)
    if lengths is not None:
        prepare.append(cut)  # what cannot be cut is refused before the first step
        hooks.wrap_micro_batches.append(lambda micro_batches: map(cut, micro_batches))
    if compiled := components.compiled:
        prepare.append(lambda first: _compile(components, compiled, world, cut(first)))
    return hooks


def _compile(components: Components, compiled: Compiled, world: World, first: MicroBatch) -> None:
    """Compile for the first batches in the phase start, which has the time for it. Collective."""
    with restoring_state(components, world.device):
        components.trained_module.train()
        try_step(components, world, first)
        evaluated = components.eval_loader.peek() if components.eval_loader is not None else None
        if evaluated is not None and not components.forward_is_collective:  # there a rank without a batch would be missed
            with evaluating(components), batch_on(world.device, evaluated) as batch, components.amp.autocast(world.device):
                components.evaluate_batch(batch)
    compiled.end_warm_up()


def _count_epochs(order: BatchOrder, state: TrainState, scheduler: EveryEpoch) -> Hooks:
    epoch_size = order.epoch_size
    assert epoch_size is not None  # build has seen to it

    def reach(step: int = 0) -> None:
        scheduler.reach(state.position // epoch_size)

    return Hooks(when_steps_begin=[reach], after_step=[reach])


def _add_values(
    components: Components, state: TrainState, window: LogWindow, values: dict[str, float], reading: Reading, *, skips_steps: bool
) -> None:
    """Add the values of some features to a training record."""
    loader = components.train_loader
    values |= {f"samples/{name}": count for name, count in loader.samples_by_source(state.position).items()}
    values |= components.compiled.values() if components.compiled else {}
    if loader.skips_bad_samples:
        values["skipped_samples"] = reading.skipped_samples
    if skips_steps:
        values["skipped_steps"] = window.skipped_steps
    values |= window.turn_means(reading)
