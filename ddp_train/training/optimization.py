"""The optimizer and the scheduler of a run, from their nodes: with parameter groups, and with what a scheduler of others lacks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from ddp_train.config.target import accepts, locate, own_keys
from ddp_train.errors import ConfigError
from ddp_train.optimizer.groups import Groups, parameter_groups
from ddp_train.training.instantiate import instantiate


def groups_of(node: Mapping[str, Any]) -> Groups:
    """Return the parameter groups that an optimizer's node asks for."""
    return own_keys(node, "optimizer").get("groups") or {}


def make_optimizer(node: Mapping[str, Any], trained: nn.Module) -> Optimizer:
    """Complete the optimizer with what is trained, when it asks for a `model`, or with parameter groups as torch's do.

    Raises:
        ConfigError: groups and parameters do not fit, or its class refuses its arguments.
    """
    ours, target = own_keys(node, "optimizer"), locate(node["_target_"])
    theirs = {name: value for name, value in node.items() if name not in ours}
    if accepts(target, "model"):
        return cast(Optimizer, instantiate(theirs, key="optimizer", first=trained))
    layer_decay, lr = ours.get("layer_decay"), _rate(theirs, target)
    if layer_decay is not None and lr is None:
        raise ConfigError(key="optimizer.lr", happened="is not given", expected="the rate of the last layer, for optimizer.layer_decay")
    groups = parameter_groups(trained, theirs.get("weight_decay"), groups=groups_of(node), layer_decay=layer_decay, lr=lr)
    return cast(Optimizer, instantiate(theirs, key="optimizer", first=groups))


def _rate(node: Mapping[str, Any], target: Any) -> float | None:
    """Return an optimizer's rate: that of its node, or its class's own."""
    default = inspect.signature(target).parameters.get("lr") if "lr" not in node else None
    rate = node.get("lr") if default is None else default.default
    return float(rate) if isinstance(rate, (int, float)) else None
