"""Turn `_target_` nodes into components, in dependency order: data, model, objective, optimizer, scheduler.

Arguments that are `auto` take the data's facts (model, objective) or the number of steps (scheduler) by their names (auto.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_train.config import auto
from ddp_train.config.batch_sizes import MICRO_BATCH
from ddp_train.config.run_config import RunConfig, evaluation_sets, set_name
from ddp_train.config.targets.target import AUTO
from ddp_train.config.tree import value_at
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import AnyObjective, Strategy, SupportsPredict, TurnObjective
from ddp_train.loader.dataset_adapter import Source
from ddp_train.loader.loader import EvaluationLoader, OneBatchTrainLoader, TrainLoader
from ddp_train.optimizer.groups import freeze
from ddp_train.training.build import data
from ddp_train.training.build.adopt import (
    groups_of,
    make_callbacks,
    make_optimizer,
    make_scheduler,
    make_strategy,
    require_rows,
    schedule_facts,
)
from ddp_train.training.build.model import build_model_and_objective, note_methods_not_called, shared_dtype, use_precision
from ddp_train.training.instantiate import instantiate
from ddp_train.training.parts.components import Components, EvaluationComponents, make_turns
from ddp_train.training.parts.metric import build_metrics
from ddp_train.training.record.throughput import make_throughput, peak_of
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.data_identity import identity_of, require_same_meaning


def build(config: RunConfig, world: World, *, compile_cache: Path | None = None) -> Components:
    """Build the components of one run on this rank. Collective.

    The folder `compile_cache` keeps what torch.compile makes.
    On the device `meta` tensors of model, objective and optimizer have no values, and the data is left where it is.

    Raises UserError: a component refuses its arguments, the data is missing or damaged, or the parts do not fit.
    """
    use_precision(config.precision)
    source, eval_sources = _open_data(config, world)
    train_loader = _train_loader(source, config, world)
    by_epochs = train_loader.order.steps_in(config.trainer.max_epochs) if config.trainer.max_epochs is not None else None
    total_steps = min(limit for limit in (config.trainer.max_steps, by_epochs) if limit is not None)
    answers = _answers(config, source.facts, world)
    answers |= auto.answer({"scheduler": config.scheduler}, schedule_facts(config.scheduler, total_steps, train_loader.order))
    strategy = make_strategy(config.strategy)
    evaluated = _evaluation_parts(config, world, answers, strategy, eval_sources)
    trained_module, objective, amp = evaluated.trained_module, evaluated.objective, evaluated.amp
    freeze(trained_module, groups_of(config.optimizer))
    if not any(parameter.requires_grad for parameter in trained_module.parameters()):
        raise ConfigError(key="model", happened="the model has no parameter to train")
    peak = peak_of(world.device, amp, trained_module, cast=strategy.param_dtype if world.has_group else None)
    throughput = make_throughput(world, objective, trained_module, source=source, peak=peak)
    notes = _prepare_model(evaluated, config, world, compile_cache)
    turns = make_turns(trained_module, objective, strategy, world)
    optimizer = make_optimizer(config.optimizer, trained_module, rate_factor=config.rate_factor())
    if world.has_group:
        require_rows(strategy, optimizer)
    optimizer_shards = strategy.setup_optimizer(optimizer) if world.has_group else {}
    scheduler = make_scheduler(config.scheduler, optimizer, answers=answers, goals=evaluated.goals)
    seed_all(config.seed, rank=world.rank)  # from here on each rank draws its own (dropout)
    evaluated.callbacks = make_callbacks(config.callbacks)
    components = Components(
        **vars(evaluated),
        turns=turns,
        strategy=strategy,
        optimizer=optimizer,
        optimizer_shards=optimizer_shards,
        scheduler=scheduler,
        scaler=amp.scaler(world.device, world.size),
        steps_in_backward=config.trainer.optimizer_in_backward,
        train_loader=train_loader,
        length_plan=data.make_length_plan(source, config.trainer),
        data_identity=identity_of(source, train_loader, config),
        total_steps=min(total_steps, config.debug.max_steps or total_steps),  # cut off, with the schedules of the whole run
        throughput=throughput,
        answers=answers,
        notes=notes,
    )
    _choose_micro_batch(components, config, world, source)
    return components


def _prepare_model(evaluated: EvaluationComponents, config: RunConfig, world: World, compile_cache: Path | None) -> list[str]:
    """Let the model recompute activations and be compiled, where the config says so. Return notes for the start of a run. Collective."""
    model = evaluated.model
    notes = [note_methods_not_called(model)]
    if config.activation_checkpointing.blocks is not None:
        from ddp_train.training.build.activation_checkpointing import checkpoint_activations  # a run without it does not import it

        notes.append(checkpoint_activations(model, config.activation_checkpointing))
    called = [*model.children()] if isinstance(evaluated.objective, TurnObjective) else [model]
    if config.compile.mode is not None:
        from ddp_train.training.parts.compiled import compile_model, compile_note

        evaluated.compiled = compile_model(model, config.compile, world, parts=called, cache_folder=compile_cache)
        notes.append(compile_note(evaluated.compiled, config.compile))
    return [line for line in notes if line]


def build_evaluation(config: RunConfig, world: World, answers: Mapping[str, Any], meaning: Mapping[str, Any]) -> EvaluationComponents:
    """Build the components of evaluation on this rank: no training data, no optimizer. Collective.

    The strategy serves where it cuts the model among the ranks, which may be too large for one; else the model is whole.

    Args:
        config: of a run that has begun, without `auto`s.
        answers: the values of these, by their keys.
        meaning: of the numbers of the run's data, to its model; {}: not known.

    Raises UserError: as `build` does; also where there is no evaluation data, or it is of another kind than the run was trained on.
    """
    use_precision(config.precision)
    if not evaluation_sets(config.tree):
        expected = "the arguments of the data set that differ for it; {} for none"
        raise conflict("data.eval", "is null: the run has no evaluation data", "{}", expected=expected)
    sources = _make_sources(config, world, evaluation_sets(config.tree))
    for key, source in sources.items():
        source.adopt(meaning)
        auto.require_kind(answers, source.facts)
        require_same_meaning(source.meaning, meaning, key=key, accepted=config.accept_changed_data)
    data.place_data(sources.values(), config.loader, world)
    added = _answers(config, next(iter(sources.values())).facts, world)  # with what was typed: another metric
    strategy = make_strategy(config.strategy)
    evaluated = _evaluation_parts(config, world, added, strategy, sources)
    if evaluated.forward_is_collective:
        return replace(evaluated, trained_module=strategy.prepare(evaluated.trained_module.requires_grad_(False), world.device, world.size))
    evaluated.trained_module.to(world.device)
    return evaluated


def _evaluation_parts(
    config: RunConfig, world: World, answers: Mapping[str, Any], strategy: Strategy, sources: Mapping[str, Source]
) -> EvaluationComponents:
    """Build the components that training and evaluation have in common; the strategy has not wrapped the model yet. Collective."""
    model, objective, trained_module = build_model_and_objective(config, world, answers, strategy)
    eval_loaders = {set_name(key): data.make_eval_loader(source, config, world, key=key) for key, source in sources.items()}
    if config.evaluation.save_predictions:
        _require_predictions(objective, eval_loaders.values())
    return EvaluationComponents(
        model=model,
        trained_module=trained_module,
        objective=objective,
        amp=instantiate(config.amp, key="amp", answers=answers),
        eval_loaders=eval_loaders,
        metrics=build_metrics(config.evaluation.metrics, objective, world, answers),
        forward_is_collective=strategy.shards_parameters and world.has_group,
    )


def _answers(config: RunConfig, facts: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return the answers for every `auto` that takes a fact of the data, or the type that all devices compute in. Collective."""
    answers = auto.answer({name: value_at(config.tree, name) for name in auto.BY_DATA}, facts)
    return answers | auto.answer({"amp": config.amp}, {"dtype": shared_dtype(world)})


def _choose_micro_batch(components: Components, config: RunConfig, world: World, source: Source) -> None:
    """With `loader.micro_batch_size=auto` let them have the largest one that fits, or the one that the run has had before. Collective."""
    if value_at(config.tree, MICRO_BATCH) != AUTO or world.device.type == "meta":
        return
    if config.batch.is_open:
        from ddp_train.training.check.micro_batch import largest_micro_batch

        sizes = [config.batch.global_batch_size, *(change.value for change in config.trainer.batch_size_schedule or ())]
        epoch_size = components.train_loader.order.epoch_size
        most = max(sizes) if epoch_size is None else min(max(sizes), epoch_size)
        share = -(-most // config.batch.world_size)  # the most samples that a rank has of a global batch
        config = config.with_micro_batch(largest_micro_batch(components, world, most=share))
        components.train_loader = _train_loader(source, config, world)
    components.answers = {**components.answers, MICRO_BATCH: config.loader.micro_batch_size}


def _open_data(config: RunConfig, world: World) -> tuple[Source, dict[str, Source]]:
    """Return the training data, and that of each evaluation set by its key, whose numbers mean the same. Collective."""
    sources = _make_sources(config, world, ["data", *evaluation_sets(config.tree)])
    train_source, eval_sources = sources["data"], {key: source for key, source in sources.items() if key != "data"}
    for key, source in eval_sources.items():
        source.adopt(train_source.meaning)
        data.require_same_facts(train_source.facts, source.facts, key=key)
        require_same_meaning(source.meaning, train_source.meaning, key=key, accepted=config.accept_changed_data)
    data.place_data(sources.values(), config.loader, world)
    return train_source, eval_sources


def _make_sources(config: RunConfig, world: World, keys: Iterable[str]) -> dict[str, Source]:
    seed_all(config.seed)  # for data that is drawn at random
    with world.main_first():  # rank 0 downloads; the others find the files
        return {key: data.make_source(config, key=key) for key in keys}


def _require_predictions(objective: AnyObjective, loaders: Iterable[EvaluationLoader]) -> None:
    key, expected = "evaluation.save_predictions", "evaluation data with positions, in whose order predictions are written"
    if any(loader.source is None for loader in loaders):
        raise conflict(key, "is true, but the evaluation data is a stream", "false", expected=expected)
    if not isinstance(objective, SupportsPredict):
        happened = f"is true, but the objective {type(objective).__name__} cannot predict"
        raise conflict(key, happened, "false", expected="one with the method `predict` (ddp_train.interfaces.SupportsPredict)")


def _train_loader(source: Source, config: RunConfig, world: World) -> TrainLoader:
    """Return the loader of the training data on this rank; with `debug.overfit` it has the first batch alone."""
    loader = data.make_train_loader(source, config, world)
    return OneBatchTrainLoader(loader) if config.debug.overfit else loader
