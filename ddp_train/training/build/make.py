"""Makes components of any class, and checks that each has what the run needs: an objective, metrics, a strategy, callbacks, metric
writers, the optimizer with its parameter groups, and the scheduler.

Each is refused with its key where it lacks something (`require_members`). One of another kind is wrapped: a loss function, a function of
predictions and targets, a strategy of another base; so is a data set (build/data.py).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.config import auto
from ddp_train.config.schema import EVALUATION_METRICS, EVENTS
from ddp_train.config.targets.locate import locate
from ddp_train.config.targets.target import check_events, declares, follows_a_metric, framework_keys
from ddp_train.config.tree import ComponentConfig
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import Callback, Goal, MetricWriter, Objective, Scheduler, Strategy, TurnObjective
from ddp_train.interfaces.objective import AdaptedObjective, AdaptedTurns
from ddp_train.interfaces.run import WriterFacts, implements
from ddp_train.interfaces.strategy import AdaptedStrategy
from ddp_train.loader.order import BatchOrder
from ddp_train.objective.supervised import LossObjective, StepObjective
from ddp_train.optimizer.groups import Groups, parameter_groups
from ddp_train.scheduler.schedule import EveryEpoch, Plateau
from ddp_train.training.instantiate import instantiate
from ddp_train.training.parts.evaluated_weights import training_mode
from ddp_train.training.parts.metric import FunctionMetric, KeptMetric, Metric
from ddp_train.traits import StrategyConstants, name_of, needs_whole_matrices, require_members, whole_matrices_error


def make_objective(objective_config: ComponentConfig, answers: Mapping[str, Any], device: torch.device) -> Objective:
    """Return the objective, on the device where it has weights of its own."""
    objective = instantiate(objective_config, key="objective", answers=answers)
    return as_objective(objective.to(device) if isinstance(objective, nn.Module) else objective)


def as_objective(candidate: Any) -> Objective:
    """Return an objective as it is, one of another class with what it lacks, and a loss function inside a `LossObjective`."""
    if isinstance(candidate, Objective):
        return candidate
    if not isinstance(candidate, type) and _has_method(candidate, "loss", "turn_loss"):
        takes_turns = _has_method(candidate, "turn_loss")
        require_members(candidate, TurnObjective if takes_turns else Objective, key="objective")
        return AdaptedTurns(candidate) if takes_turns else AdaptedObjective(candidate)
    if callable(candidate) and not isinstance(candidate, type):
        _refuse_mean_by_weights(candidate)
        return StepObjective(candidate) if _is_step(candidate) else LossObjective(candidate)
    given = f"the class {candidate.__name__}, not an instance" if isinstance(candidate, type) else f"a {type(candidate).__name__}"
    expected = "a ddp_train.Objective, a function step(model, batch), or one loss_fn(outputs, targets)"
    raise ConfigError(key="objective._target_", happened=f"gave {given}", expected=expected)


def _has_method(candidate: Any, *names: str) -> bool:
    """Tell whether an object has one of the methods; a submodule of that name, as a loss may have, is none."""
    return any(hasattr(type(candidate), name) or name in getattr(candidate, "__dict__", {}) for name in names)


def _is_step(function: Any) -> bool:
    """Tell by the names of its arguments whether a function is a step: the first is called model, or the second batch."""
    try:
        first, second = [*inspect.signature(function).parameters, "", ""][:2]
    except ValueError:  # of a function that is built in
        return False
    return first == "model" or second == "batch"


def _refuse_mean_by_weights(loss_fn: Any) -> None:
    """Refuse torch's mean by weights of classes: it depends on the batch, which a fresh model, whose losses are alike, hardly shows."""
    if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss_fn.weight is not None and loss_fn.reduction == "mean":
        happened = "is mean, which divides by the weights of the batch's classes: the loss would change with the number of ranks"
        expected = "one value for each sample"
        raise ConfigError(key="objective.reduction", happened=happened, expected=expected, fix="+objective.reduction=none")


def make_metrics(configs: Mapping[str, Any], objective: Objective, world: World, answers: Mapping[str, Any]) -> dict[str, Metric]:
    """Make the metrics of `evaluation.metrics`, on this rank's device."""
    wanted = {name: config for name, config in configs.items() if config}
    if taken := [name for name in wanted if name in objective.goals]:
        happened = f"{name_of(objective)} has a metric of this name"
        raise ConfigError(key=f"{EVALUATION_METRICS}.{taken[0]}", happened=happened, expected="another name")
    candidates = {name: instantiate(config, key=f"{EVALUATION_METRICS}.{name}", answers=answers) for name, config in wanted.items()}
    return {name: as_metric(candidate, name, world.device) for name, candidate in candidates.items()}


def as_metric(candidate: Any, name: str, device: torch.device) -> Metric:
    """Return a metric around an object of `evaluation.metrics`: of torchmetrics' kind, or a function."""
    parts = candidate.modules() if isinstance(candidate, nn.Module) else ()
    if any(type(part).__module__ == "torchmetrics.wrappers.running" for part in parts):
        happened = f"gave a {type(candidate).__name__}, whose value covers the last batches only"
        expected = "a metric of all samples: its value must not depend on which rank saw which batch"
        raise ConfigError(key=f"evaluation.metrics.{name}._target_", happened=happened, expected=expected, fix="the metric that it wraps")
    if isinstance(candidate, nn.Module) and hasattr(candidate, "_reductions"):  # a MetricCollection has none: it keeps states in groups
        return KeptMetric(candidate.to(device))
    if callable(candidate) and not isinstance(candidate, (nn.Module, type)) and not hasattr(candidate, "compute"):
        return FunctionMetric(candidate)
    raise ConfigError(
        key=f"evaluation.metrics.{name}._target_",
        happened=f"gave a {type(candidate).__name__}",
        expected="a torchmetrics.Metric (several: each with its own name), or a function f(predictions, targets) -> a number,"
        " of which neither has a default",
    )


def make_strategy(strategy_config: ComponentConfig) -> Strategy:
    strategy = instantiate(strategy_config, key="strategy")
    require_members(strategy, Strategy, key="strategy")
    return strategy if isinstance(strategy, Strategy) else AdaptedStrategy(strategy)


def make_writers(writer_configs: Mapping[str, ComponentConfig | None], facts: WriterFacts) -> list[MetricWriter]:
    """Return the metric writers of rank 0."""
    answers = auto.answer({"metrics": writer_configs}, vars(facts))
    wanted = {f"metrics.{name}": writer_config for name, writer_config in writer_configs.items() if writer_config}
    writers = [instantiate(writer_config, key=key, answers=answers) for key, writer_config in wanted.items()]
    for key, writer in zip(wanted, writers, strict=True):
        require_members(writer, MetricWriter, key=key)
    return writers


def make_callbacks(callback_configs: Mapping[str, ComponentConfig | None]) -> dict[str, Callback]:
    """Return the callbacks by name. Each has an event, and one of all may have weights for evaluation."""
    wanted = {name: callback_config for name, callback_config in callback_configs.items() if callback_config}
    callbacks = {name: instantiate(callback_config, key=f"callbacks.{name}") for name, callback_config in wanted.items()}
    for name, callback in callbacks.items():
        methods = [method for method in (*dir(callback), *EVENTS) if implements(callback, method)]
        for error in check_events(f"gave a {type(callback).__name__}, which", methods, key=f"callbacks.{name}._target_"):
            raise error
    averaging = [name for name, callback in callbacks.items() if implements(callback, "evaluation_weights")]
    if len(averaging) > 1:
        key, happened = f"callbacks.{averaging[1]}", f"has weights for evaluation, and callbacks.{averaging[0]} has, too"
        raise ConfigError(key=key, happened=happened, expected="one of them", fix=f"~{key}")
    return callbacks


def groups_of(optimizer_config: ComponentConfig) -> Groups:
    """Return the parameter groups that an optimizer's config asks for."""
    return framework_keys(optimizer_config, "optimizer").get("groups") or {}


def make_optimizer(optimizer_config: ComponentConfig, trained_module: nn.Module, *, rate_factor: float = 1.0) -> Optimizer:
    """Complete the optimizer with the trained parameters, in groups or by its `model`; all rates take the factor (`optimizer.lr_scale`)."""
    settings, target = framework_keys(optimizer_config, "optimizer"), locate(optimizer_config["_target_"])
    class_config = {name: value for name, value in optimizer_config.items() if name not in settings}
    run_object: Any = trained_module
    if not declares(target, "model"):
        layer_decay, lr = settings.get("layer_decay"), class_config.get("lr")
        if layer_decay is not None and lr is None:
            raise ConfigError(key="optimizer.lr", happened="is not given", expected="the learning rate of the last layer")
        decay = class_config.get("weight_decay")
        run_object = parameter_groups(trained_module, decay, groups=groups_of(optimizer_config), layer_decay=layer_decay, lr=lr)
    optimizer: Optimizer = instantiate(class_config, key="optimizer", run_object=run_object)
    for group in optimizer.param_groups if rate_factor != 1.0 else ():
        if group.get("lr") is None:
            happened = f"is given, and a {type(optimizer).__name__} sets its learning rate itself"
            raise conflict("optimizer.lr_scale", happened, "null optimizer.base_batch_size=null", expected="one with a learning rate")
        group["lr"] = group["lr"] * rate_factor
    training_mode(optimizer)
    return optimizer


def require_rows(strategy: StrategyConstants, optimizer: object) -> None:
    """Raise a ConfigError for an optimizer (or one within `Several`) that needs whole matrices, where each rank steps rows of them."""
    if strategy.shards_optimizer:
        for part in getattr(optimizer, "optimizers", (optimizer,)):
            if needs_whole_matrices(type(part)):
                raise whole_matrices_error("optimizer", type(part).__name__)


def schedule_facts(scheduler_config: ComponentConfig, total_steps: int, order: BatchOrder) -> dict[str, int]:
    """Return the facts for `auto` arguments of a scheduler: its steps in the run, and those of an epoch, where there are epochs."""
    facts = {} if order.steps_per_epoch is None else {"steps_per_epoch": order.steps_per_epoch}
    if framework_keys(scheduler_config, "scheduler").get("every") != "epoch":
        return {"total_steps": total_steps, **facts}
    if order.epoch_size is None:
        happened = "is epoch, and the data does not say how many samples it has: there are no epochs"
        raise conflict("scheduler.every", happened, "step", expected="a scheduler that counts steps")
    return {"total_steps": -(-order.samples_after(total_steps) // order.epoch_size), **facts}


def make_scheduler(
    scheduler_config: ComponentConfig, optimizer: Optimizer, *, answers: Mapping[str, Any], goals: Mapping[str, Goal]
) -> Scheduler:
    """Complete the scheduler with the optimizer; one that counts epochs or follows one of the metrics moves on at its own times."""
    settings = framework_keys(scheduler_config, "scheduler")
    class_config = {name: value for name, value in scheduler_config.items() if name not in settings}
    if not follows_a_metric(locate(scheduler_config["_target_"])):
        scheduler = instantiate(class_config, key="scheduler", answers=answers, run_object=optimizer)
        require_members(scheduler, Scheduler, key="scheduler")
        return EveryEpoch(scheduler) if settings.get("every") == "epoch" else scheduler
    metric = settings.get("metric") or next(iter(goals), "")
    if metric not in goals:
        happened = f"is {metric!r}, which the objective does not measure"
        raise ConfigError(key="scheduler.metric", happened=happened, expected=f"one of {', '.join(goals) or 'its metrics: it has none'}")
    mode = class_config.get("mode", goals[metric])
    if mode != goals[metric]:
        better = "larger" if goals[metric] == "max" else "smaller"
        raise conflict("scheduler.mode", f"is {mode}, and a {better} {metric} is better", goals[metric], expected=goals[metric])
    return Plateau(instantiate({**class_config, "mode": mode}, key="scheduler", answers=answers, run_object=optimizer), metric)
