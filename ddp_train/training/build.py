"""Turn `_target_` nodes into components, in dependency order: data, model, objective, optimizer, scheduler.

The only module that instantiates. What only the run knows is filled in here: arguments that are `auto` take the data's facts (model,
objective), the number of steps (scheduler) or the run's folder (metrics) by their names (auto.py); the optimizer gets the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_train.config import auto
from ddp_train.config.batch_sizes import accumulation_of
from ddp_train.config.evaluation_split import evaluation_split
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import EVENTS, LoaderConfig, TrainerConfig, batch_changes
from ddp_train.config.target import AUTO, accepts, given_in, locate
from ddp_train.config.tree import at
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Amp, Averaging, Borrowing, DataSource, Joint, Meeting, Objective, Predicting, Resident, Strategy
from ddp_train.loader.dataset_adapter import DatasetSource, as_source
from ddp_train.loader.loader import EvalLoader, Evaluation, Loader, TrainLoader, require_samples
from ddp_train.loader.one_batch import OneBatch
from ddp_train.loader.order import BatchOrder, SampleOrder
from ddp_train.loader.sampler import labels_of, sampler_from
from ddp_train.loader.stream import Stream, StreamEvalLoader, StreamLoader, StreamOrder, is_stream
from ddp_train.objective.loss import as_objective
from ddp_train.optimizer.groups import freeze
from ddp_train.training import callbacks, initial_weights
from ddp_train.training.compiled import compile_model, use_plain_names
from ddp_train.training.components import Components, Evaluated
from ddp_train.training.instantiate import instantiate, refuse_tools
from ddp_train.training.metric import build_metrics, goals_of
from ddp_train.training.optimization import groups_of, make_optimizer, make_scheduler, schedule_facts
from ddp_train.training.seeding import seed_all
from ddp_train.training.turn import make_turns, takes_turns


def build(config: RunConfig, world: World) -> Components:
    """Build the components of one run on this rank. Collective.

    On the device `meta` tensors of model, objective and optimizer have no values, and the data is left where it is.

    Raises:
        UserError: a component refuses its arguments, the data is missing or damaged, or the parts do not fit.
    """
    refuse_tools(config)
    seed_all(config.seed)  # for data that is drawn at random
    with world.main_first():  # rank 0 downloads; the others find the files
        train_source = _source(config, key="data")
        eval_source = _source(config, key="data.eval") if config.data["eval"] is not None else None
    facts = train_source.facts
    if eval_source is not None:
        _require_same_facts(facts, eval_source.facts)
    answers = auto.answer({name: at(config.tree, name) for name in auto.BY_DATA}, facts)
    if config.loader.on_device:
        _place(train_source, world)
        if eval_source is not None:
            _place(eval_source, world)
    train_loader = _train_loader(train_source, config, world)
    if config.debug.overfit:
        train_loader = OneBatch(train_loader)
    eval_loader = _eval_loader(eval_source, config, world) if eval_source is not None else None
    total_steps = _total_steps(config.trainer, train_loader.order)
    answers |= auto.answer({"scheduler": config.scheduler}, schedule_facts(config.scheduler, total_steps, train_loader.order))

    model, objective, trained = _model_and_objective(config, world, answers)
    freeze(trained, groups_of(config.optimizer))
    if not any(parameter.requires_grad for parameter in trained.parameters()):
        raise ConfigError(key="model", happened="the model has no parameter to train")
    if config.evaluation.save_predictions:
        _require_predictions(objective, eval_source)
    strategy: Strategy = instantiate(config.strategy, key="strategy")
    if config.compile:  # turns call parts of the model
        for part in model.children() if takes_turns(objective) else [model]:
            compile_model(part, world)
    turns = make_turns(trained, objective, strategy, world)
    module = trained.to(world.device) if turns else strategy.prepare(trained, world.device, world.size)
    optimizer = make_optimizer(config.optimizer, trained)
    metrics = build_metrics(config.evaluation.metrics, objective, world, answers)
    scheduler = make_scheduler(config.scheduler, optimizer, answers=answers, goals=goals_of(objective, metrics))
    amp: Amp = instantiate(config.amp, key="amp")
    seed_all(config.seed, rank=world.rank)  # from here on each rank draws its own (dropout)

    made = _callbacks(config.callbacks)
    return Components(
        model=model,
        trained=trained,
        module=module,
        turns=turns,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        amp=amp,
        scaler=amp.scaler(world.device, world.size),
        strategy=strategy,
        train_loader=train_loader,
        eval_loader=eval_loader,
        total_steps=min(total_steps, config.debug.max_steps or total_steps),  # cut off, with the schedules of the whole run
        callbacks=made,
        fresh=callbacks.fresh_states(made),
        metrics=metrics,
        answers=answers,
    )


def build_evaluated(config: RunConfig, world: World, answers: Mapping[str, Any]) -> Evaluated:
    """Build what evaluation needs on this rank, and nothing else: no training data, no optimizer, no strategy. Collective.

    Args:
        config: of a run that has begun, without `auto`s.
        answers: what these have come to, by their keys.

    Raises:
        UserError: as `build` does; also where there is no evaluation data, or it is of another kind than the run was trained on.
    """
    refuse_tools(config)
    if config.data["eval"] is None:
        raise ConfigError(
            key="data.eval",
            happened="is null: the run has no evaluation data",
            expected="the arguments of the data set that differ for it; {} for none",
            fix="data.eval={}",
        )
    seed_all(config.seed)  # for data that is drawn at random
    with world.main_first():
        source = _source(config, key="data.eval")
    auto.require_kind(answers, source.facts)
    if config.loader.on_device:
        _place(source, world)
    added = auto.answer({name: at(config.tree, name) for name in auto.BY_DATA}, source.facts)  # with what was typed: another metric
    model, objective, trained = _model_and_objective(config, world, added)
    if config.evaluation.save_predictions:
        _require_predictions(objective, source)
    return Evaluated(
        model=model,
        trained=trained.to(world.device),
        objective=objective,
        amp=instantiate(config.amp, key="amp"),
        eval_loader=_eval_loader(source, config, world),
        metrics=build_metrics(config.evaluation.metrics, objective, world, added),
    )


def build_model(config: RunConfig, world: World, answers: Mapping[str, Any]) -> nn.Module:
    """Return the model, with the initial weights that it has on every rank and for every number of ranks; made where the world is meta."""
    seed_all(config.seed)
    with world.device if world.device.type == "meta" else nullcontext():
        model = instantiate(config.model, key="model", answers=answers)
    if not isinstance(model, nn.Module):
        raise ConfigError(key="model._target_", happened=f"gave a {type(model).__name__}", expected="a torch.nn.Module")
    use_plain_names(model)
    return model


def _model_and_objective(config: RunConfig, world: World, answers: Mapping[str, Any]) -> tuple[nn.Module, Objective, nn.Module]:
    """Return the model, the objective, and both in one module where the objective has a state of its own, else the model again."""
    model = build_model(config, world, answers)
    with world.device if world.device.type == "meta" else nullcontext():
        objective = instantiate(config.objective, key="objective", answers=answers)
    if isinstance(objective, nn.Module):  # a loss with weights of its own
        objective = objective.to(world.device)
    objective = as_objective(objective)
    if isinstance(objective, Meeting):
        objective.meet(model)
    if isinstance(objective, Borrowing):
        _borrow(objective, world)
    return model, objective, Joint(model, objective) if has_state(objective) else model


def make_data(config: RunConfig, *, key: str) -> Any:
    """Return what the section `data` names.

    Args:
        key: `data`, or `data.eval` for the evaluation data.
    """
    if key == "data":
        return instantiate({name: value for name, value in config.data.items() if name != "eval"}, key=key)
    try:
        return instantiate(evaluation_split(config.data), key=key)
    except UserError as error:
        name = error.key.removeprefix("data.")
        if name in config.data["eval"]:  # a data set knows its arguments as `data.split` alone
            error.key = f"data.eval.{name}"
            fix = error.fix.replace(f"data.{name}=", f"data.eval.{name}=")
            error.fix = " or ".join(part for part in (fix, "data.eval=null for none") if part)
        raise


def _source(config: RunConfig, *, key: str) -> DataSource | Stream:
    made, fields, node = make_data(config, key=key), config.loader.fields, config.loader.collate
    collate = instantiate(node, key="loader.collate") if node is not None else None
    if not callable(collate) and collate is not None:
        expected = "a function that takes a list of samples, or a class whose objects do"
        raise ConfigError(key="loader.collate._target_", happened=f"gave a {type(collate).__name__}", expected=expected)
    return Stream(made, fields, collate) if is_stream(made) else as_source(made, fields, collate)


def _own_sampler(source: DataSource, config: RunConfig) -> Any:
    """Return what `loader.sampler` names, completed with what it asks for by name; None: nothing."""
    node, key = config.loader.sampler, "loader.sampler"
    if node is None:
        return None
    dataset = source.dataset if isinstance(source, DatasetSource) else source
    offers: dict[str, Callable[[], Any]] = {
        "data_source": lambda: dataset,
        "dataset": lambda: dataset,
        "labels": lambda: labels_of(source),
        "seed": lambda: config.seed,
        "global_batch_size": lambda: config.batch.global_batch_size,
    }
    target = locate(node["_target_"])
    given = {f"{key}.{name}": offers[name]() for name in given_in(key) if name not in node and accepts(target, name)}
    return instantiate({**node, **dict.fromkeys((each.rpartition(".")[2] for each in given), AUTO)}, key=key, answers=given)


def _train_loader(source: DataSource | Stream, config: RunConfig, world: World) -> Loader:
    loader, batch = config.loader, config.batch
    drop_last = loader.drop_last or config.debug.overfit
    reading: dict[str, Any] = {**_reading(loader, world), "grad_accum_steps": batch.grad_accum_steps}
    if isinstance(source, Stream):
        _require_plain(loader)
        _require_steps(config, source)
        _require_one_size(config.trainer, source)
        batches = StreamOrder(source.length, global_batch_size=batch.global_batch_size, drop_last=drop_last)
        return StreamLoader(source, batches, **reading)
    require_samples(source, key="data", at_least=batch.global_batch_size if loader.drop_last else 1)
    sampler = sampler_from(
        source,
        seed=config.seed,
        global_batch_size=batch.global_batch_size,
        drop_last=loader.drop_last,
        sampling=loader.sampling,
        sample_weights=loader.sample_weights,
        bucket_batches=loader.bucket_batches,
        own=_own_sampler(source, config),
    )
    changes = batch_changes(config.trainer.batch_size_schedule or {})
    order = SampleOrder(
        sampler,
        global_batch_size=min(batch.global_batch_size, sampler.length),
        drop_last=drop_last,
        changes=[(step, min(size, sampler.length)) for step, size in changes],
    )
    skips = loader.on_bad_sample == "skip"
    if not changes:
        return TrainLoader(source, order, **reading, skips=skips)
    by_size = partial(accumulation_of, loader=loader, world_size=world.size)  # the last batch of an epoch has as few as its size asks for
    sizes = (batch.global_batch_size, *(size for _, size in changes))
    reading["grad_accum_steps"] = max(by_size(min(size, sampler.length)) for size in sizes)
    return TrainLoader(source, order, **reading, skips=skips, by_size=by_size)


def _eval_loader(source: DataSource | Stream, config: RunConfig, world: World) -> Evaluation:
    loader, batch_size = config.loader, config.evaluation.batch_size
    limits = [limit * batch_size for limit in (config.evaluation.max_batches, config.debug.max_batches) if limit is not None]
    most = min(limits, default=None)
    if isinstance(source, Stream):
        _require_plain(loader)
        return StreamEvalLoader(source, rank=world.rank, world_size=world.size, batch_size=batch_size, most=most)
    require_samples(source, key="data.eval")
    return EvalLoader(source, batch_size=batch_size, **_reading(loader, world), skips=loader.on_bad_sample == "skip", most=most)


def _reading(loader: LoaderConfig, world: World) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "world_size": world.size,
        "num_workers": loader.num_workers,
        "pin_memory": world.device.type == "cuda" and not loader.on_device,
    }


def _require_plain(loader: LoaderConfig) -> None:
    """Refuse for a stream what needs positions: samples to choose from, and one to name when it cannot be read."""
    for key, plain in {"on_bad_sample": "raise", "sampling": "shuffled", "bucket_batches": None, "sampler": None}.items():
        if getattr(loader, key) != plain:
            expected = f"{'null' if plain is None else plain}: samples of a stream have no positions"
            if key == "on_bad_sample":
                expected += "; it has to skip by itself (WebDataset: handler=warn_and_continue)"
            raise ConfigError(key=f"loader.{key}", happened=f"is {getattr(loader, key)}, and the data is a stream", expected=expected)


def _require_steps(config: RunConfig, stream: Stream) -> None:
    """Refuse to count in epochs where the data has none."""
    name, is_evaluated = type(stream.dataset).__name__, config.data["eval"] is not None
    needed = [("trainer.max_steps", config.trainer.max_steps, 1000)]
    needed += [("evaluation.every_steps", config.evaluation.every_steps, 100)] if is_evaluated else []
    for key, value, example in needed:
        if stream.length is None and value is None:
            raise ConfigError(
                key=key,
                happened=f"is null, and {name} does not say how many samples it has: there are no epochs",
                expected="a number of steps",
                fix=f"{key}={example}",
            )


def _require_one_size(trainer: TrainerConfig, stream: Stream) -> None:
    """Refuse batch sizes that change: what a reader of a stream has read ahead was cut for one."""
    if trainer.batch_size_schedule:
        raise ConfigError(
            key="trainer.batch_size_schedule",
            happened=f"is given, and the data is a stream ({type(stream.dataset).__name__})",
            expected="data with positions, or null",
            fix="trainer.batch_size_schedule=null",
        )


def _place(source: DataSource | Stream, world: World) -> None:
    """Move a data set to the rank's device."""
    if not isinstance(source, Resident):
        raise ConfigError(
            key="loader.on_device",
            happened=f"a {type(source).__name__} cannot live on the device",
            expected="a data source with to(device)",
            fix="loader.on_device=false",
        )
    if world.device.type != "meta":
        source.to(world.device)


def _require_same_facts(train: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
    """Refuse splits of two kinds: a class folder that one of them lacks would shift the labels without a word."""
    for name in train.keys() & evaluation.keys():
        if train[name] != evaluation[name]:
            raise ConfigError(
                key="data.eval",
                happened=f"the evaluation split has {name} {evaluation[name]}, the training split {train[name]}",
                expected="the same in both",
            )


def _require_predictions(objective: Objective, source: DataSource | Stream | None) -> None:
    if isinstance(source, Stream):
        raise ConfigError(
            key="evaluation.save_predictions",
            happened="is true, but the evaluation data is a stream",
            expected="evaluation data with positions, in whose order predictions are written",
            fix="evaluation.save_predictions=false",
        )
    if not isinstance(objective, Predicting):
        raise ConfigError(
            key="evaluation.save_predictions",
            happened=f"is true, but the objective {type(objective).__name__} cannot say what it found for each sample",
            expected="an objective with the method `predict` (ddp_train/interfaces.py, Predicting)",
            fix="evaluation.save_predictions=false",
        )


def _callbacks(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Make the callbacks, in the order of the configuration."""
    made = {name: instantiate(node, key=f"callbacks.{name}") for name, node in nodes.items() if node}
    for name, each in made.items():
        if not any(callable(getattr(each, event, None)) for event in EVENTS):
            raise ConfigError(
                key=f"callbacks.{name}._target_",
                happened=f"gave a {type(each).__name__}, which has none of the methods {', '.join(EVENTS)}",
                expected="a callback (ddp_train/interfaces.py, Callback), with at least one of them",
            )
    averaging = [name for name, each in made.items() if isinstance(each, Averaging)]
    if len(averaging) > 1:
        raise ConfigError(
            key=f"callbacks.{averaging[1]}",
            happened=f"has weights for evaluation, and callbacks.{averaging[0]} has, too",
            expected="one of them",
            fix=f"~callbacks.{averaging[1]}",
        )
    return made


def _borrow(objective: Borrowing, world: World) -> None:
    """Load the weights of others that an objective begins with. Collective; on the device `meta` there is nothing to load into."""
    for part, source in objective.borrows.items() if world.device.type != "meta" else ():
        lines = initial_weights.load(Path(source), getattr(objective, part), world, renames={}, is_strict=True)
        if world.is_main:
            print(*lines, sep="\n", flush=True)


def _total_steps(trainer: TrainerConfig, order: BatchOrder) -> int:
    """Return the run's length in optimizer steps: max_steps or, where there are epochs, max_epochs, whichever ends first."""
    by_epochs = order.steps_in(trainer.max_epochs) if trainer.max_epochs is not None else None
    limits = [limit for limit in (trainer.max_steps, by_epochs) if limit is not None]
    return int(min(limits))


def has_state(objective: Objective) -> bool:
    """Tell whether an objective has something to train, to share or to save. A part that evaluates keeps its buffers as they are.

    Raises:
        ConfigError: it has parameters to train where nobody finds them.
    """
    if isinstance(objective, nn.Module):
        changing = (buffer for part in objective.modules() if part.training for buffer in part.buffers(recurse=False))
        return any(parameter.requires_grad for parameter in objective.parameters()) or any(True for _ in changing)
    for name, value in getattr(objective, "__dict__", {}).items():
        held = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else []
        if any(tensor.requires_grad for tensor in held):
            raise ConfigError(
                key="objective",
                happened=f"{type(objective).__name__}.{name} has parameters to train, but {type(objective).__name__} is no torch.nn.Module",
                expected="an nn.Module, whose parameters are found, trained and saved",
                fix=f"class {type(objective).__name__}(nn.Module), with super().__init__(); or {name}.requires_grad_(False)",
            )
    return False
