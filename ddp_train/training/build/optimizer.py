"""The optimizer and the scheduler of a run from their nodes: parameter groups, learning rates, and when the scheduler moves on."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_train.config.targets.locate import accepts, locate
from ddp_train.config.targets.target import own_keys
from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import Goal, Scheduler
from ddp_train.interfaces.adapted import require_members
from ddp_train.loader.order import BatchOrder
from ddp_train.optimizer.groups import Groups, parameter_groups
from ddp_train.scheduler.schedule import EveryEpoch, Plateau
from ddp_train.training.instantiate import instantiate
from ddp_train.training.parts.evaluated_weights import training_mode
from ddp_train.traits import follows_a_metric


def groups_of(node: Mapping[str, Any]) -> Groups:
    """Return the parameter groups that an optimizer's node asks for."""
    return own_keys(node, "optimizer").get("groups") or {}


def make_optimizer(node: Mapping[str, Any], trained: nn.Module, *, rate_factor: float = 1.0) -> Optimizer:
    """Complete the optimizer with what is trained, as its `model` or in groups, whose rates all take the factor (`optimizer.lr_scale`)."""
    settings, target = own_keys(node, "optimizer"), locate(node["_target_"])
    class_node = {name: value for name, value in node.items() if name not in settings}
    run_object: Any = trained
    if not accepts(target, "model"):
        layer_decay, lr = settings.get("layer_decay"), _rate(class_node, target)
        if layer_decay is not None and lr is None:
            raise ConfigError(key="optimizer.lr", happened="is not given", expected="the learning rate of the last layer")
        run_object = parameter_groups(trained, class_node.get("weight_decay"), groups=groups_of(node), layer_decay=layer_decay, lr=lr)
    optimizer: Optimizer = instantiate(class_node, key="optimizer", run_object=run_object)
    for group in optimizer.param_groups if rate_factor != 1.0 else ():
        if group.get("lr") is None:
            happened = f"is given, and a {type(optimizer).__name__} sets its learning rate itself"
            raise conflict("optimizer.lr_scale", happened, "null optimizer.base_batch_size=null", expected="one with a learning rate")
        group["lr"] = group["lr"] * rate_factor
    training_mode(optimizer)
    return optimizer


def _rate(node: Mapping[str, Any], target: Any) -> float | None:
    """Return an optimizer's rate: that of its node, or its class's own."""
    default = inspect.signature(target).parameters.get("lr") if "lr" not in node else None
    rate = node.get("lr") if default is None else default.default
    return float(rate) if isinstance(rate, (int, float)) else None


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
    settings = own_keys(node, "scheduler")
    class_node = {name: value for name, value in node.items() if name not in settings}
    if not follows_a_metric(locate(node["_target_"])):
        scheduler = instantiate(class_node, key="scheduler", answers=answers, run_object=optimizer)
        require_members(scheduler, Scheduler, key="scheduler")
        return EveryEpoch(scheduler) if settings.get("every") == "epoch" else scheduler
    metric = settings.get("metric") or next(iter(goals), "")
    if metric not in goals:
        happened = f"is {metric!r}, which the objective does not measure"
        raise ConfigError(key="scheduler.metric", happened=happened, expected=f"one of {', '.join(goals) or 'its metrics: it has none'}")
    mode = class_node.get("mode", goals[metric])
    if mode != goals[metric]:
        better = "larger" if goals[metric] == "max" else "smaller"
        raise conflict("scheduler.mode", f"is {mode}, and a {better} {metric} is better", goals[metric], expected=goals[metric])
    return Plateau(instantiate({**class_node, "mode": mode}, key="scheduler", answers=answers, run_object=optimizer), metric)
