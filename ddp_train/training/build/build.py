"""Turn `_target_` nodes into components, in dependency order: data, model, objective, optimizer, scheduler.

What only the run knows is filled in here: arguments that are `auto` take the data's facts (model,
objective), the number of steps (scheduler) or the run's folder (metrics) by their names (auto.py); the optimizer gets the parameters.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from ddp_train.config import auto
from ddp_train.config.batch_sizes import MICRO_BATCH
from ddp_train.config.evaluation_sets import evaluation_sets, set_name
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import EVENTS
from ddp_train.config.targets.locate import accepts, locate
from ddp_train.config.targets.target import AUTO, own_keys
from ddp_train.config.tree import value_at
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import AdaptedStrategy, AnyObjective, Goal, Scheduler, Strategy, SupportsPredict, TurnObjective, overrides
from ddp_train.loader.loader import Loader, OneBatch
from ddp_train.loader.order import BatchOrder
from ddp_train.loader.stream import Source, Stream
from ddp_train.optimizer.groups import Groups, freeze, parameter_groups
from ddp_train.scheduler.schedule import EveryEpoch, Plateau
from ddp_train.training.build import data
from ddp_train.training.build.model import build_model_and_objective, note_methods_not_called, shared_dtype, use_precision
from ddp_train.training.instantiate import instantiate
from ddp_train.training.parts.compiled import compile_model, compile_note
from ddp_train.training.parts.components import Components, EvaluationParts, wrap
from ddp_train.training.parts.evaluated_weights import training_mode
from ddp_train.training.parts.metric import build_metrics
from ddp_train.training.record.throughput import make_throughput, peak_of
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.data_identity import accepted_meaning_changes, identity_of
from ddp_train.traits import follows_a_metric, require_rows


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

    strategy = _strategy(config)
    evaluated = _evaluation_parts(config, world, answers, strategy, eval_sources)
    model, trained, objective, amp = evaluated.model, evaluated.trained, evaluated.objective, evaluated.amp
    freeze(trained, groups_of(config.optimizer))
    if not any(parameter.requires_grad for parameter in trained.parameters()):
        raise ConfigError(key="model", happened="the model has no parameter to train")
    peak = peak_of(world.device, amp, trained, cast=strategy.param_dtype if world.has_group else None)
    throughput = make_throughput(world, objective, trained, source=source, peak=peak)
    notes = [note_methods_not_called(model), _checkpoint_activations(model, config)]
    called = [*model.children()] if isinstance(objective, TurnObjective) else [model]
    compiled = compile_model(model, config.compile, world, parts=called, cache_folder=compile_cache)
    notes.append(compile_note(compiled, config.compile))
    module, turns = wrap(trained, objective, strategy, world)

    optimizer = make_optimizer(config.optimizer, trained, rate_factor=config.rate_factor())
    if world.has_group:
        require_rows(strategy, optimizer)
    optimizer_shards = strategy.setup_optimizer(optimizer) if world.has_group else {}
    scheduler = make_scheduler(config.scheduler, optimizer, answers=answers, goals=evaluated.goals)
    seed_all(config.seed, rank=world.rank)  # from here on each rank draws its own (dropout)

    components = Components(
        model=model,
        trained=trained,
        objective=objective,
        amp=amp,
        eval_loaders=evaluated.eval_loaders,
        callbacks=_callbacks(config.callbacks),
        metrics=evaluated.metrics,
        forward_is_collective=evaluated.forward_is_collective,
        compiled=compiled,
        module=module,
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
        notes=[line for line in notes if line],
    )
    if value_at(config.tree, MICRO_BATCH) == AUTO and world.device.type != "meta":
        return _measure_micro_batch(components, config, world, source)
    return components


def build_evaluation(config: RunConfig, world: World, answers: Mapping[str, Any], meaning: Mapping[str, Any]) -> EvaluationParts:
    """Build what evaluation needs on this rank, and nothing else: no training data, no optimizer. Collective.

    The strategy serves where it cuts the model among the ranks, which may be too large for one; else the model is whole.

    Args:
        config: of a run that has begun, without `auto`s.
        answers: what these have come to, by their keys.
        meaning: what the numbers of the run's data mean to its model; {}: not known.

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
        accepted_meaning_changes(source.meaning, meaning, key=key, accepted=config.accept_changed_data)
    data.place_data(sources.values(), config.loader, world)
    added = _answers(config, next(iter(sources.values())).facts, world)  # with what was typed: another metric
    strategy = _strategy(config)
    evaluated = _evaluation_parts(config, world, added, strategy, sources)
    if evaluated.forward_is_collective:
        return replace(evaluated, trained=strategy.prepare(evaluated.trained.requires_grad_(False), world.device, world.size))
    evaluated.trained.to(world.device)
    return evaluated


def _evaluation_parts(
    config: RunConfig, world: World, answers: Mapping[str, Any], strategy: Strategy, sources: Mapping[str, Source]
) -> EvaluationParts:
    """Build what training and evaluation have in common; the strategy has not wrapped it yet. Collective."""
    model, objective, trained = build_model_and_objective(config, world, answers, strategy)
    if config.evaluation.save_predictions:
        _require_predictions(objective, sources.values())
    return EvaluationParts(
        model=model,
        trained=trained,
        objective=objective,
        amp=instantiate(config.amp, key="amp", answers=answers),
        eval_loaders={set_name(key): data.make_eval_loader(source, config, world, key=key) for key, source in sources.items()},
        metrics=build_metrics(config.evaluation.metrics, objective, world, answers),
        forward_is_collective=strategy.shards_parameters and world.has_group,
    )


def _answers(config: RunConfig, facts: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Return what the `auto`s come to that take a fact of the data, or the type that all devices compute in. Collective."""
    answers = auto.answer({name: value_at(config.tree, name) for name in auto.BY_DATA}, facts)
    return answers | auto.answer({"amp": config.amp}, {"dtype": shared_dtype(world)})


def _checkpoint_activations(model: nn.Module, config: RunConfig) -> str:
    if config.activation_checkpointing.blocks is None:
        return ""
    from ddp_train.training.build.activation_checkpointing import checkpoint_activations  # a run without it does not import it

    return checkpoint_activations(model, config.activation_checkpointing)


def _measure_micro_batch(components: Components, config: RunConfig, world: World, source: Source) -> Components:
    """Return the components with the largest micro-batch that fits, or with the one that the run has had before. Collective."""
    if config.batch.is_open:
        from ddp_train.training.check.micro_batch import largest_micro_batch

        config = config.with_micro_batch(largest_micro_batch(components, world, most=_largest_share(config, components)))
        components = replace(components, train_loader=_train_loader(source, config, world))
    return replace(components, answers={**components.answers, MICRO_BATCH: config.loader.micro_batch_size})


def _open_data(config: RunConfig, world: World) -> tuple[Source, dict[str, Source]]:
    """Return the training data, and that of each evaluation set by its key, whose numbers mean the same. Collective."""
    eval_sources = _make_sources(config, world, ["data", *evaluation_sets(config.tree)])
    train_source = eval_sources.pop("data")
    meaning = train_source.meaning
    for key, source in eval_sources.items():
        source.adopt(meaning)
        data.require_same_facts(train_source.facts, source.facts, key=key)
        accepted_meaning_changes(source.meaning, meaning, key=key, accepted=config.accept_changed_data)
    data.place_data((train_source, *eval_sources.values()), config.loader, world)
    return train_source, eval_sources


def _make_sources(config: RunConfig, world: World, keys: Iterable[str]) -> dict[str, Source]:
    seed_all(config.seed)  # for data that is drawn at random
    with world.main_first():  # rank 0 downloads; the others find the files
        return {key: data.make_source(config, key=key) for key in keys}


def _strategy(config: RunConfig) -> Strategy:
    strategy = instantiate(config.strategy, key="strategy")
    return strategy if isinstance(strategy, Strategy) else AdaptedStrategy(strategy)


def _require_predictions(objective: AnyObjective, sources: Iterable[Source]) -> None:
    key, expected = "evaluation.save_predictions", "evaluation data with positions, in whose order predictions are written"
    if any(isinstance(source, Stream) for source in sources):
        raise conflict(key, "is true, but the evaluation data is a stream", "false", expected=expected)
    if not isinstance(objective, SupportsPredict):
        happened = f"is true, but the objective {type(objective).__name__} cannot predict"
        raise conflict(key, happened, "false", expected="one with the method `predict` (ddp_train.interfaces.SupportsPredict)")


def _train_loader(source: Source, config: RunConfig, world: World) -> Loader:
    """Return what reads the training data on this rank: its first batch alone with `debug.overfit`."""
    loader = data.make_train_loader(source, config, world)
    return OneBatch(loader) if config.debug.overfit else loader


def _largest_share(config: RunConfig, components: Components) -> int:
    """Return the most samples that a rank has of a global batch."""
    sizes = [config.batch.global_batch_size, *(change.value for change in config.trainer.batch_size_schedule or ())]
    epoch_size = components.train_loader.order.epoch_size
    most = max(sizes) if epoch_size is None else min(max(sizes), epoch_size)
    return -(-most // config.batch.world_size)


def _callbacks(nodes: Mapping[str, Any]) -> dict[str, Any]:
    callbacks = {name: instantiate(node, key=f"callbacks.{name}") for name, node in nodes.items() if node}
    for name, callback in callbacks.items():
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            happened = f"gave a {type(callback).__name__}, which has none of the methods {', '.join(EVENTS)}"
            expected = "a callback (ddp_train.interfaces.Callback), with at least one of them"
            raise ConfigError(key=f"callbacks.{name}._target_", happened=happened, expected=expected)
    averaging = [name for name, callback in callbacks.items() if overrides(callback, "evaluation_weights")]
    if len(averaging) > 1:
        key, happened = f"callbacks.{averaging[1]}", f"has weights for evaluation, and callbacks.{averaging[0]} has, too"
        raise ConfigError(key=key, happened=happened, expected="one of them", fix=f"~{key}")
    return callbacks


def groups_of(node: Mapping[str, Any]) -> Groups:
    """Return the parameter groups that an optimizer's node asks for."""
    return own_keys(node, "optimizer").get("groups") or {}


def make_optimizer(node: Mapping[str, Any], trained: nn.Module, *, rate_factor: float = 1.0) -> Optimizer:
    """Complete the optimizer with what is trained, as its `model` or in groups, whose rates all take the factor (`optimizer.lr_scale`)."""
    ours, target = own_keys(node, "optimizer"), locate(node["_target_"])
    theirs = {name: value for name, value in node.items() if name not in ours}
    if accepts(target, "model"):
        return _scaled(cast(Optimizer, instantiate(theirs, key="optimizer", first=trained)), rate_factor)
    layer_decay, lr = ours.get("layer_decay"), _rate(theirs, target)
    if layer_decay is not None and lr is None:
        raise ConfigError(key="optimizer.lr", happened="is not given", expected="the learning rate of the last layer")
    groups = parameter_groups(trained, theirs.get("weight_decay"), groups=groups_of(node), layer_decay=layer_decay, lr=lr)
    optimizer = _scaled(cast(Optimizer, instantiate(theirs, key="optimizer", first=groups)), rate_factor)
    training_mode(optimizer)
    return optimizer


def _scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    if factor != 1.0:
        for group in optimizer.param_groups:
            if group.get("lr") is None:
                happened = f"is given, and a {type(optimizer).__name__} sets its learning rate itself"
                raise conflict("optimizer.lr_scale", happened, "null optimizer.base_batch_size=null", expected="one with a learning rate")
            group["lr"] = group["lr"] * factor
    return optimizer


def schedule_facts(node: Mapping[str, Any], total_steps: int, order: BatchOrder) -> dict[str, int]:
    """Return what `auto` arguments of a scheduler take: how often it moves on in the run, and an epoch's steps, where there are epochs."""
    facts = {} if order.steps_per_epoch is None else {"steps_per_epoch": order.steps_per_epoch}
    if own_keys(node, "scheduler").get("every") != "epoch":
        return {"total_steps": total_steps, **facts}
    if order.epoch_size is None:
        happened = "is epoch, and the data does not say how many samples it has: there are no epochs"
        raise conflict("scheduler.every", happened, "step", expected="a scheduler that counts steps")
    return {"total_steps": -(-order.samples_after(total_steps) // order.epoch_size), **facts}


def make_scheduler(node: Mapping[str, Any], optimizer: Optimizer, *, answers: Mapping[str, Any], goals: Mapping[str, Goal]) -> Scheduler:
    """Complete the scheduler with the optimizer; one that counts epochs or follows one of the metrics moves on at its own times."""
    ours = own_keys(node, "scheduler")
    theirs = {name: value for name, value in node.items() if name not in ours}
    if not follows_a_metric(locate(node["_target_"])):
        scheduler = instantiate(theirs, key="scheduler", answers=answers, first=optimizer)
        return EveryEpoch(scheduler) if ours.get("every") == "epoch" else cast(Scheduler, scheduler)
    metric = ours.get("metric") or next(iter(goals), "")
    if metric not in goals:
        happened = f"is {metric!r}, which the objective does not measure"
        raise ConfigError(key="scheduler.metric", happened=happened, expected=f"one of {', '.join(goals) or 'its metrics: it has none'}")
    mode = theirs.get("mode", goals[metric])
    if mode != goals[metric]:
        better = "larger" if goals[metric] == "max" else "smaller"
        raise conflict("scheduler.mode", f"is {mode}, and a {better} {metric} is better", goals[metric], expected=goals[metric])
    return Plateau(instantiate({**theirs, "mode": mode}, key="scheduler", answers=answers, first=optimizer), metric)


def _rate(node: Mapping[str, Any], target: Any) -> float | None:
    """Return an optimizer's rate: that of its node, or its class's own."""
    default = inspect.signature(target).parameters.get("lr") if "lr" not in node else None
    rate = node.get("lr") if default is None else default.default
    return float(rate) if isinstance(rate, (int, float)) else None
