"""Turn components' configs into components, in dependency order: data, model, objective, optimizer, scheduler.

Arguments that are `auto` take the data's facts (model, objective) or the number of steps (scheduler) by their names (auto.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ddp_train.config import auto
from ddp_train.config.batch_sizes import MICRO_BATCH, accumulation_of
from ddp_train.config.run_config import RunConfig, evaluation_sets, set_name
from ddp_train.config.targets.target import AUTO
from ddp_train.config.tree import value_at
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import BatchLoss, Objective, Scheduler, Strategy, TurnObjective
from ddp_train.loader.dataset_adapter import Source
from ddp_train.loader.loader import EvaluationLoader, OneBatchTrainLoader, TrainLoader
from ddp_train.optimizer.groups import freeze
from ddp_train.training.build import data
from ddp_train.training.build.make import (
    groups_of,
    make_callbacks,
    make_metrics,
    make_optimizer,
    make_scheduler,
    make_strategy,
    require_rows,
    schedule_facts,
)
from ddp_train.training.build.model import build_model_and_objective, note_methods_not_called, shared_dtype, use_precision
from ddp_train.training.instantiate import instantiate
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.training.parts.turns import Turns, as_loss_module, make_turns
from ddp_train.training.record.throughput import Throughput, make_throughput, peak_of
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.data_identity import identity_of, require_same_meaning
from ddp_train.training.state.saved_state import fresh_states

if TYPE_CHECKING:
    from ddp_train.training.parts.compiled import Compiled


def build(config: RunConfig, world: World, *, compile_cache: Path | None = None) -> Components:
    """Build the components of one run on this rank. Collective.

    The folder `compile_cache` keeps what torch.compile makes.
    On the device `meta` tensors of model, objective and optimizer have no values, and the data is left where it is.

    Raises UserError: a component refuses its arguments, the data is missing or damaged, or the parts do not fit.
    """
    use_precision(config.precision)
    # The data first: what it says of itself, and the number of steps, are what `auto` arguments of all others take.
    source, eval_sources = _open_data(config, world)
    train_loader = _train_loader(source, config, world)
    by_epochs = train_loader.order.steps_in(config.trainer.max_epochs) if config.trainer.max_epochs is not None else None
    total_steps = min(limit for limit in (config.trainer.max_steps, by_epochs) if limit is not None)
    answers = _answers(config, source.facts, world)
    answers |= auto.answer({"scheduler": config.scheduler}, schedule_facts(config.scheduler, total_steps, train_loader.order))
    strategy = make_strategy(config.strategy)
    parts = _build_model(config, world, answers, strategy, eval_sources)
    prepared = _prepare_model(parts, config, world, strategy, source=source, compile_cache=compile_cache)
    optimization = _build_optimization(parts, config, world, answers, strategy)
    _require_gatherable(parts.objective, config, strategy)
    seed_all(config.seed, rank=world.rank)  # from here on each rank draws its own (dropout)
    callbacks = make_callbacks(config.callbacks)
    components = Components(
        model=parts.model,
        trained_module=parts.trained_module,
        objective=parts.objective,
        seed=config.seed,
        amp=parts.amp,
        eval_loaders=parts.eval_loaders,
        callbacks=callbacks,
        evaluation_metrics=parts.evaluation_metrics,
        forward_is_collective=parts.forward_is_collective,
        compiled=prepared.compiled,
        turns=optimization.turns,
        strategy=strategy,
        optimizer=optimization.optimizer,
        optimizer_shards=optimization.optimizer_shards,
        scheduler=optimization.scheduler,
        scaler=parts.amp.scaler(world.device, world.size),
        steps_in_backward=config.trainer.optimizer_in_backward,
        train_loader=train_loader,
        length_plan=data.make_length_plan(source, config.trainer),
        data_identity=identity_of(source, train_loader, config),
        total_steps=min(total_steps, config.debug.max_steps or total_steps),  # cut off, with the schedules of the whole run
        throughput=prepared.throughput,
        fresh_states=fresh_states(callbacks),
        answers=answers,
        notes=prepared.notes,
    )
    is_measured = config.batch.is_open and world.device.type != "meta"
    return _with_measured_micro_batch(components, config, world, source) if is_measured else components


def _build_model(
    config: RunConfig, world: World, answers: Mapping[str, Any], strategy: Strategy, eval_sources: Mapping[str, Source]
) -> EvaluationComponents:
    """Build the model and the objective, and what evaluates them. The strategy has not wrapped them yet. Collective."""
    made = build_model_and_objective(config, world, answers, strategy)
    return EvaluationComponents(
        model=made.model,
        trained_module=made.trained_module,
        objective=made.objective,
        seed=config.seed,
        eval_loaders=_eval_loaders(config, world, made.objective, eval_sources),
        amp=instantiate(config.amp, key="amp", answers=answers),
        evaluation_metrics=make_metrics(config.evaluation.metrics, made.objective, world, answers),
        forward_is_collective=strategy.shards_parameters and world.has_group,
    )


class _PreparedModel(NamedTuple):
    throughput: Throughput  # of the model as it was built
    compiled: Compiled | None
    notes: list[str]


def _prepare_model(
    parts: EvaluationComponents, config: RunConfig, world: World, strategy: Strategy, *, source: Source, compile_cache: Path | None
) -> _PreparedModel:
    """Freeze parameters; let the model recompute activations and be compiled, where the config says so. Collective.

    All of it comes before the strategy wraps the model, which must know what is trained.
    """
    freeze(parts.trained_module, groups_of(config.optimizer))
    if not any(parameter.requires_grad for parameter in parts.trained_module.parameters()):
        raise ConfigError(key="model", happened="the model has no parameter to train")
    peak = peak_of(world.device, parts.amp, parts.trained_module, cast=strategy.param_dtype if world.has_group else None)
    throughput = make_throughput(world, parts.objective, parts.trained_module, source=source, peak=peak)
    compiled = None
    notes = [note_methods_not_called(parts.model)]
    if config.activation_checkpointing.blocks is not None:
        from ddp_train.training.build.activation_checkpointing import checkpoint_activations  # a run without it does not import it

        notes.append(checkpoint_activations(parts.model, config.activation_checkpointing))
    if config.compile.mode is not None:
        from ddp_train.training.parts.compiled import compile_model, compile_note

        called = [*parts.model.children()] if isinstance(parts.objective, TurnObjective) else [parts.model]
        compiled = compile_model(parts.model, config.compile, world, parts=called, cache_folder=compile_cache)
        notes.append(compile_note(compiled, config.compile))
    return _PreparedModel(throughput, compiled, [line for line in notes if line])


class _Optimization(NamedTuple):
    turns: Turns
    optimizer: Optimizer
    optimizer_shards: Mapping[Tensor, Tensor]
    scheduler: Scheduler


def _build_optimization(
    parts: EvaluationComponents, config: RunConfig, world: World, answers: Mapping[str, Any], strategy: Strategy
) -> _Optimization:
    """Let the strategy wrap the model for each turn, and make optimizer and scheduler. Collective.

    The strategy wraps the model first: that may move its parameters, or shard them, and the optimizer takes them as they are then.
    """
    turns = Turns(partial(make_turns, parts.trained_module, parts.objective, strategy, world))
    optimizer = make_optimizer(config.optimizer, parts.trained_module, rate_factor=config.rate_factor())
    if world.has_group:
        require_rows(strategy, optimizer)
    shards = strategy.setup_optimizer(optimizer) if world.has_group else {}
    scheduler = make_scheduler(config.scheduler, optimizer, answers=answers, goals=parts.goals)
    return _Optimization(turns, optimizer, shards, scheduler)


def _with_measured_micro_batch(components: Components, config: RunConfig, world: World, source: Source) -> Components:
    """Return the components with a train loader of the largest micro-batches that fit (`loader.micro_batch_size=auto`). Collective.

    Sizes are tried with samples of the train loader, which itself has one size for good: so another one is made.
    """
    from ddp_train.training.check.micro_batch import largest_micro_batch

    sizes = [config.batch.global_batch_size, *(change.value for change in config.trainer.batch_size_schedule or ())]
    epoch_size = components.train_loader.order.epoch_size
    most = max(sizes) if epoch_size is None else min(max(sizes), epoch_size)
    size = largest_micro_batch(components, world, most=-(-most // config.batch.world_size))  # the most samples of a step on one rank
    train_loader = _train_loader(source, config.with_micro_batch(size), world)
    return replace(components, train_loader=train_loader, answers={**components.answers, MICRO_BATCH: size})


def _require_gatherable(objective: Objective, config: RunConfig, strategy: Strategy) -> None:
    """Refuse an objective that gathers the samples of all ranks where these are not the global batch: ConfigError."""
    if not isinstance(objective, BatchLoss) or not objective.gathers or config.batch.world_size == 1:
        return
    expected = "one micro-batch a step, as many samples on each rank, and gradients of all ranks in every step"
    if strategy.weights_are_per_rank:
        happened = "lets ranks take steps of their own, and the objective gathers the samples of all"
        raise conflict("strategy", happened, "ddp", expected=expected)
    for size in (config.batch.global_batch_size, *(change.value for change in config.trainer.batch_size_schedule or ())):
        if size % config.batch.world_size:
            happened = f"is {size}, which {config.batch.world_size} ranks cannot share evenly, and the objective gathers the samples of all"
            fix = size - size % config.batch.world_size
            raise conflict("trainer.global_batch_size", happened, fix, expected=expected)
        if (accumulation := accumulation_of(size, config.loader, config.batch.world_size)) > 1:
            happened = f"leaves {accumulation} micro-batches in a step, and the objective compares all samples of it"
            raise conflict(MICRO_BATCH, happened, size // config.batch.world_size, expected=expected)


def build_evaluation(config: RunConfig, world: World, answers: Mapping[str, Any], meaning: Mapping[str, Any]) -> EvaluationComponents:
    """Build the components of evaluation on this rank: no training data, no optimizer. Collective.

    The strategy serves where it cuts the model among the ranks, which may be too large for one; else the model is whole.
    The run has begun: `answers` has the values of its `auto`s, `meaning` that of its data's numbers to its model ({}: not known).

    Raises UserError: as `build` does; also where there is no evaluation data, or it is of another kind than the run was trained on.
    """
    use_precision(config.precision)
    if not evaluation_sets(config.tree):
        expected = "the arguments of the data set that differ for it; {} for none"
        raise conflict("data.eval", "is null: the run has no evaluation data", "{}", expected=expected)
    sources = _make_sources(config, world, evaluation_sets(config.tree))
    for key, source in sources.items():
        source.use_meaning(meaning)
        auto.require_kind(answers, source.facts)
        require_same_meaning(source.meaning, meaning, key=key, accepted=config.accept_changed_data)
    data.place_data(sources.values(), config.loader, world)
    added = _answers(config, next(iter(sources.values())).facts, world)  # with what was typed: another metric
    strategy = make_strategy(config.strategy)
    parts = _build_model(config, world, added, strategy, sources)
    if parts.forward_is_collective:
        strategy.prepare(as_loss_module(parts.trained_module.requires_grad_(False), parts.objective), world.device, world.size)
    else:
        parts.trained_module.to(world.device)
    return parts


def _open_data(config: RunConfig, world: World) -> tuple[Source, dict[str, Source]]:
    """Return the training data, and that of each evaluation set by its key, whose numbers mean the same. Collective."""
    sources = _make_sources(config, world, ["data", *evaluation_sets(config.tree)])
    train_source, eval_sources = sources["data"], {key: source for key, source in sources.items() if key != "data"}
    for key, source in eval_sources.items():
        source.use_meaning(train_source.meaning)
        data.require_same_facts(train_source.facts, source.facts, key=key)
        require_same_meaning(source.meaning, train_source.meaning, key=key, accepted=config.accept_changed_data)
    data.place_data(sources.values(), config.loader, world)
    return train_source, eval_sources


def _make_sources(config: RunConfig, world: World, keys: Iterable[str]) -> dict[str, Source]:
    seed_all(config.seed)  # for data that is drawn at random
    with world.main_first():  # rank 0 downloads; the others find the files
        return {key: data.make_source(config, key=key) for key in keys}


def _train_loader(source: Source, config: RunConfig, world: World) -> TrainLoader:
    """Return the loader of the training data on this rank; with `debug.overfit` it has the first batch alone."""
    loader = data.make_train_loader(source, config, world)
    return OneBatchTrainLoader(loader) if config.debug.overfit else loader


def _answers(config: RunConfig, facts: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the answers for every `auto` that takes a fact of the data, the type of all devices, or an earlier measurement. Collective."""
    answers = auto.answer({name: value_at(config.tree, name) for name in auto.BY_DATA}, facts)
    if value_at(config.tree, MICRO_BATCH) == AUTO and not config.batch.is_open:  # measured when the run began
        answers[MICRO_BATCH] = config.loader.micro_batch_size
    return answers | auto.answer({"amp": config.amp}, {"dtype": shared_dtype(world)})


def _eval_loaders(config: RunConfig, world: World, objective: Objective, sources: Mapping[str, Source]) -> dict[str, EvaluationLoader]:
    """Return the loaders of the evaluation sets on this rank, by the sets' names."""
    loaders = {set_name(key): data.make_eval_loader(source, config, world, key=key) for key, source in sources.items()}
    if config.evaluation.save_predictions and any(loader.source is None for loader in loaders.values()):
        expected = "evaluation data with positions, in whose order predictions are written"
        raise conflict("evaluation.save_predictions", "is true, but the evaluation data is a stream", "false", expected=expected)
    return loaders
