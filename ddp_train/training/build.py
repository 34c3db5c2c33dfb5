"""Turn `_target_` nodes into components, in dependency order: data, model, objective, optimizer, scheduler.

The only module that instantiates. What only the run knows is filled in here: arguments that are `auto` take the data's facts (model,
objective), the number of steps (scheduler) or the run's folder (metrics) by their names (auto.py); the optimizer gets the parameters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import hydra.utils
import torch
from hydra.errors import HydraException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_train.amp import Amp
from ddp_train.config import auto
from ddp_train.config.check import nodes
from ddp_train.config.rules import BatchIdentity
from ddp_train.config.schema import LOADER_KEYS
from ddp_train.config.spelling import removal
from ddp_train.config.target import accepts, locate, refusal
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Batch, DataSource, MetricWriter, Objective, Predicting, Resident, Strategy
from ddp_train.joint import Joint, has_state
from ddp_train.loader.dataset_adapter import as_source
from ddp_train.loader.loader import EvalLoader, Evaluation, Loader, TrainLoader, require_samples
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import draw_from
from ddp_train.loader.stream import Stream, StreamEvalLoader, StreamLoader, StreamOrder, is_stream
from ddp_train.objective.loss import as_objective
from ddp_train.optimizer import parameter_groups
from ddp_train.redaction import reveal
from ddp_train.training.state import seed_all


@dataclass(kw_only=True)
class Components:
    """Everything that the loop works with."""

    model: nn.Module  # as the config says; what is evaluated
    trained: nn.Module  # the model, joined with an objective that has a state of its own: what is optimised, saved and compared
    module: nn.Module  # the same, as the strategy wraps it
    objective: Objective
    optimizer: Optimizer
    scheduler: LRScheduler
    amp: Amp
    scaler: torch.amp.GradScaler
    strategy: Strategy
    train_loader: Loader
    eval_loader: Evaluation | None
    total_steps: int
    answers: Mapping[str, Any] = field(default_factory=dict)  # what the arguments that are `auto` came to, by their keys

    def loss(self, batch: Batch) -> Tensor:
        """Return the objective's loss of a batch, shape [], computed through what the strategy has wrapped."""
        if isinstance(self.trained, Joint):
            loss: Tensor = self.module(batch)
            return loss
        return self.objective.loss(self.module, batch)


def build(tree: Mapping[str, Any], batch: BatchIdentity, world: World) -> Components:
    """Build the components of one run on this rank. Collective.

    Raises:
        UserError: a component refuses its arguments, the data is missing or damaged, or the parts do not fit.
    """
    data, trainer = tree["data"], tree["trainer"]
    _refuse_tools(tree)
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


def build_writers(nodes: Mapping[str, Any], **run_facts: Any) -> list[MetricWriter]:
    """Build the metric writers of rank 0. An argument that is `auto` takes the run's fact of the same name."""
    answers = auto.answer({"metrics": nodes}, run_facts)
    return [instantiate(node, key=f"metrics.{name}", answers=answers) for name, node in nodes.items() if node]


def instantiate(node: Mapping[str, Any], *, key: str, answers: Mapping[str, Any] | None = None, first: Any = None) -> Any:
    """Create what a node names, after completing it with what only the run knows.

    Args:
        key: the node's config key, for errors.
        answers: values for the arguments that are `auto`, by their keys.
        first: a first positional argument (parameters, a model, an optimizer).

    Raises:
        UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    filled = {
        name: answers[f"{key}.{name}"] for name in node if f"{key}.{name}" in answers
    }  # as they are, whatever Hydra would make of them
    given = {name: auto.put(value, f"{key}.{name}", answers) for name, value in node.items() if name not in filled}
    try:
        make = hydra.utils.instantiate({"_convert_": "all", **reveal(given), "_partial_": True})
    except KeyError as error:
        raise ConfigError(key=key, happened=f"the environment variable {error} is not set here", fix=f"export {error}=...") from None
    except HydraException as error:  # of a node inside this one: its cause says more than Hydra's words around it
        cause = error.__cause__ or error
        _refuse_unexpected(cause, node, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    if node.get("_partial_") and first is None:
        return functools.partial(make, **filled)
    try:
        return make(*([] if first is None else [first]), **filled)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ConfigError(key=key, happened=f"{node['_target_']}: {error}") from None  # the call itself did not fit
        _refuse_unexpected(error, node, key)
        error.add_note(f"config key: {key}")
        raise


def _refuse_unexpected(error: BaseException, node: Mapping[str, Any], key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    for at, value in nodes({key: node}) if found else ():
        if found and at.endswith(f".{found[1]}"):
            fix = f"remove it: {removal(at, value)}"
            raise ConfigError(key=at, happened=f"is passed on to something that does not take it: {error}", fix=fix) from error


def _refuse_tools(tree: Mapping[str, Any]) -> None:
    """Check once more what will be called: this process may find other modules under the same names than the one that composed."""
    for key, node in nodes(tree):
        if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
            for problem in refusal(node, key, locate(node["_target_"]), tree["allowed_targets"]):
                raise problem


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


def _train_loader(source: DataSource | Stream, tree: Mapping[str, Any], batch: BatchIdentity, world: World) -> Loader:
    data = tree["data"]
    reading: dict[str, Any] = {**_reading(data, world), "grad_accum_steps": batch.grad_accum_steps}
    if isinstance(source, Stream):
        _require_plain(data)
        _require_steps(tree, source)
        batches = StreamOrder(source.length, global_batch_size=batch.global_batch_size, drop_last=data["drop_last"])
        return StreamLoader(source, batches, **reading)
    require_samples(source, key="data", at_least=batch.global_batch_size if data["drop_last"] else 1)
    draw = draw_from(
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
