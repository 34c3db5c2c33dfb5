"""Turn `_target_` nodes into components, in dependency order: data, model, objective, optimizer, scheduler.

The only module that instantiates. What only the run knows is filled in here: arguments that are `auto` take the data's facts (model,
objective), the number of steps (scheduler) or the run's folder (metrics) by their names (auto.py); the optimizer gets the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_train.config import auto
from ddp_train.config.batch_sizes import BatchSizes
from ddp_train.config.schema import LOADER_KEYS
from ddp_train.config.target import accepts, locate
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Amp, DataSource, Joint, Objective, Predicting, Resident, Strategy
from ddp_train.loader.dataset_adapter import as_source
from ddp_train.loader.loader import EvalLoader, Evaluation, Loader, TrainLoader, require_samples
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import sampler_from
from ddp_train.loader.stream import Stream, StreamEvalLoader, StreamLoader, StreamOrder, is_stream
from ddp_train.objective.loss import as_objective
from ddp_train.optimizer import parameter_groups
from ddp_train.training.components import Components
from ddp_train.training.instantiate import instantiate, refuse_tools
from ddp_train.training.seeding import seed_all


def build(tree: Mapping[str, Any], batch: BatchSizes, world: World) -> Components:
    """Build the components of one run on this rank. Collective.

    Raises:
        UserError: a component refuses its arguments, the data is missing or damaged, or the parts do not fit.
    """
    data, trainer = tree["data"], tree["trainer"]
    refuse_tools(tree)
    seed_all(tree["seed"])  # for data that is drawn at random
    with world.main_first():  # rank 0 downloads; the others find the files
        train_source = _source(data, {}, key="data")
        eval_source = _source(data, data["eval"], key="data.eval") if data["eval"] is not None else None
    facts = train_source.facts
    if eval_source is not None:
        _require_same_facts(facts, eval_source.facts)
    answers = auto.answer({name: tree[name] for name in auto.BY_DATA}, facts)
    if data["on_device"]:
        for source in (train_source, eval_source):
            _place(source, world)
    train_loader = _train_loader(train_source, tree, batch, world)
    eval_loader = _eval_loader(eval_source, data, world) if eval_source is not None else None
    total_steps = _total_steps(trainer, train_loader.order.steps_per_epoch)
    answers |= auto.answer({"scheduler": tree["scheduler"]}, {"total_steps": total_steps})

    seed_all(tree["seed"])  # the same initial weights on every rank, and for every number of ranks
    model = instantiate(tree["model"], key="model", answers=answers)
    if not isinstance(model, nn.Module):
        raise ConfigError(key="model._target_", happened=f"gave a {type(model).__name__}", expected="a torch.nn.Module")
    objective = instantiate(tree["objective"], key="objective", answers=answers)
    if isinstance(objective, nn.Module):  # a loss with weights of its own
        objective = objective.to(world.device)
    objective = as_objective(objective)
    trained = Joint(model, objective) if has_state(objective) else model
    if not any(parameter.requires_grad for parameter in trained.parameters()):
        raise ConfigError(key="model", happened="the model has no parameter to train")
    if tree["evaluate"]["save_predictions"]:
        _require_predictions(objective, eval_source)
    strategy: Strategy = instantiate(tree["strategy"], key="strategy")
    module = strategy.prepare(trained, world.device, world.size)
    optimizer = _optimizer(tree["optimizer"], trained)
    scheduler = instantiate(tree["scheduler"], key="scheduler", answers=answers, first=optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(key="scheduler._target_", happened="ReduceLROnPlateau follows a metric", expected="a schedule of steps")
    amp: Amp = instantiate(tree["amp"], key="amp")
    seed_all(tree["seed"], rank=world.rank)  # from here on each rank draws its own (dropout)

    return Components(
        model=model,
        trained=trained,
        module=module,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        amp=amp,
        scaler=amp.scaler(world.device, world.size),
        strategy=strategy,
        train_loader=train_loader,
        eval_loader=eval_loader,
        total_steps=total_steps,
        answers=answers,
    )


def _source(data: Mapping[str, Any], changes: Mapping[str, Any] | None, *, key: str) -> DataSource | Stream:
    node = {name: value for name, value in data.items() if name not in LOADER_KEYS}
    try:
        made = instantiate({**node, **(changes or {})}, key=key)
    except UserError as error:
        if key == "data.eval":
            _blame_evaluation(error, changes or {})
        raise
    return Stream(made, data["fields"]) if is_stream(made) else as_source(made, data["fields"])


def _blame_evaluation(error: UserError, changes: Mapping[str, Any]) -> None:
    """Name the key that gave the evaluation split its value: a data set knows its arguments as `data.split` alone."""
    name = error.key.removeprefix("data.")
    if name in changes:
        error.key = f"data.eval.{name}"
        error.fix = " or ".join(
            part for part in (error.fix.replace(f"data.{name}=", f"data.eval.{name}="), "data.eval=null for none") if part
        )


def _train_loader(source: DataSource | Stream, tree: Mapping[str, Any], batch: BatchSizes, world: World) -> Loader:
    data = tree["data"]
    reading: dict[str, Any] = {**_reading(data, world), "grad_accum_steps": batch.grad_accum_steps}
    if isinstance(source, Stream):
        _require_plain(data)
        _require_steps(tree, source)
        batches = StreamOrder(source.length, global_batch_size=batch.global_batch_size, drop_last=data["drop_last"])
        return StreamLoader(source, batches, **reading)
    require_samples(source, key="data", at_least=batch.global_batch_size if data["drop_last"] else 1)
    draw = sampler_from(
        source,
        seed=tree["seed"],
        global_batch_size=batch.global_batch_size,
        **{name: data[name] for name in ("drop_last", "sampling", "sample_weights", "bucket_batches")},
    )
    order = SampleOrder(draw, global_batch_size=min(batch.global_batch_size, draw.length), drop_last=data["drop_last"])
    return TrainLoader(source, order, **reading, skips=data["on_bad_sample"] == "skip")


def _eval_loader(source: DataSource | Stream, data: Mapping[str, Any], world: World) -> Evaluation:
    batch_size = data["eval_batch_size"] or data["micro_batch_size"]
    if isinstance(source, Stream):
        _require_plain(data)
        return StreamEvalLoader(source, rank=world.rank, world_size=world.size, batch_size=batch_size)
    require_samples(source, key="data.eval")
    return EvalLoader(source, batch_size=batch_size, **_reading(data, world), skips=data["on_bad_sample"] == "skip")


def _reading(data: Mapping[str, Any], world: World) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "world_size": world.size,
        "num_workers": data["num_workers"],
        "pin_memory": world.device.type == "cuda" and not data["on_device"],
    }


def _require_plain(data: Mapping[str, Any]) -> None:
    """Refuse for a stream what needs positions: samples to choose from, and one to name when it cannot be read."""
    for key, plain in {"on_bad_sample": "raise", "sampling": "shuffled", "bucket_batches": None}.items():
        if data[key] != plain:
            expected = f"{'null' if plain is None else plain}: samples of a stream have no positions"
            if key == "on_bad_sample":
                expected += "; it has to skip by itself (WebDataset: handler=warn_and_continue)"
            raise ConfigError(key=f"data.{key}", happened=f"is {data[key]}, and the data is a stream", expected=expected)


def _require_steps(tree: Mapping[str, Any], stream: Stream) -> None:
    """Refuse to count in epochs where the data has none."""
    if stream.length is not None:
        return
    trainer, name = tree["trainer"], type(stream.dataset).__name__
    needed = {"max_steps": 1000} | ({"evaluate_every_steps": 100} if tree["data"]["eval"] is not None else {})
    for key, example in needed.items():
        if trainer[key] is None:
            raise ConfigError(
                key=f"trainer.{key}",
                happened=f"is null, and {name} does not say how many samples it has: there are no epochs",
                expected="a number of steps",
                fix=f"trainer.{key}={example}",
            )


def _place(source: DataSource | Stream | None, world: World) -> None:
    """Move a data set to the rank's device."""
    if source is not None and not isinstance(source, Resident):
        raise ConfigError(
            key="data.on_device",
            happened=f"a {type(source).__name__} cannot live on the device",
            expected="a data source with to(device)",
            fix="data.on_device=false",
        )
    if source is not None:
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
            key="evaluate.save_predictions",
            happened="is true, but the evaluation data is a stream",
            expected="evaluation data with positions, in whose order predictions are written",
            fix="evaluate.save_predictions=false",
        )
    if not isinstance(objective, Predicting):
        raise ConfigError(
            key="evaluate.save_predictions",
            happened=f"is true, but the objective {type(objective).__name__} cannot say what it found for each sample",
            expected="an objective with the method `predict` (ddp_train/interfaces.py, Predicting)",
            fix="evaluate.save_predictions=false",
        )


def _optimizer(node: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """Complete the optimizer with the model, when it asks for one, or with parameter groups as torch's do."""
    if accepts(locate(node["_target_"]), "model"):
        return cast(Optimizer, instantiate(node, key="optimizer", first=model))
    groups = parameter_groups(model, node.get("weight_decay"))
    return cast(Optimizer, instantiate(node, key="optimizer", first=groups))


def _total_steps(trainer: Mapping[str, Any], steps_per_epoch: int | None) -> int:
    """Return the run's length in optimizer steps: max_steps or, where there are epochs, max_epochs, whichever ends first."""
    by_epochs = trainer["max_epochs"] * steps_per_epoch if trainer["max_epochs"] is not None and steps_per_epoch is not None else None
    limits = [limit for limit in (trainer["max_steps"], by_epochs) if limit is not None]
    return int(min(limits))


def has_state(objective: Objective) -> bool:
    """Tell whether an objective has something to train, to share or to save.

    Raises:
        ConfigError: it has parameters to train where nobody finds them.
    """
    if isinstance(objective, nn.Module):
        return any(parameter.requires_grad for parameter in objective.parameters()) or any(True for _ in objective.buffers())
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
