"""An optimizer's saved state: compared with the optimizer, split as its groups are, and loaded; and the schedule of its groups."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces.parameters import named_parameters

PARAMETERS = "optimizer_parameters"
"""The key of a checkpoint with the names of an optimizer's parameters, in the order of its groups: its state has only their numbers."""
_CLASS = "optimizer_class"
_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")  # in the state of torch's schedulers


def optimizer_content(optimizer: Optimizer, trained: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint has of an optimizer."""
    return {"optimizer": optimizer.state_dict(), _CLASS: _saved_class_name(optimizer), PARAMETERS: _parameter_names(optimizer, trained)}


def compare_optimizer(optimizer: Optimizer, trained: nn.Module, shared: Mapping[str, Any]) -> list[str]:
    """Return the difference between the optimizer and the saved one."""
    if _saved_class_name(optimizer) != shared[_CLASS]:
        return [f"the optimizer was {shared[_CLASS]}, and is {_saved_class_name(optimizer)}"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in regrouped(optimizer, shared["optimizer"])]
    if sizes != saved_sizes:
        return [f"the optimizer's groups had {saved_sizes} parameters, and have {sizes}"]
    pairs = zip(_parameter_names(optimizer, trained), shared[PARAMETERS], strict=True)
    other = next(((name, saved_name) for name, saved_name in pairs if name != saved_name), None)
    return [f"the optimizer had the parameters in another order: {other[1]} where {other[0]} is now"] if other else []


def _parameter_names(optimizer: Optimizer, trained: nn.Module) -> list[str]:
    names = {parameter: name for name, parameter in named_parameters(trained).items()}
    return [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]


def regrouped(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's saved state, split as the optimizer's groups are.

    Without weight decay there is one group instead of two (`optimizer.parameter_groups`), of the same parameters in the same order. Groups
    that differ in more are returned as they are.
    """
    numbers = [(number, group) for group in saved["param_groups"] for number in group["params"]]
    groups: list[dict[str, Any]] = []
    for target in optimizer.param_groups:
        members, numbers = numbers[: len(target["params"])], numbers[len(target["params"]) :]
        sources = [group for _, group in members]
        settings = [{key: value for key, value in group.items() if key not in ("params", "weight_decay")} for group in sources]
        if not sources or sources[0].keys() != target.keys() or any(other != settings[0] for other in settings):
            return list(saved["param_groups"])
        groups.append({**sources[0], "params": [number for number, _ in members]})
    return list(saved["param_groups"]) if numbers else groups


def regrouped_schedule(state: Any, optimizer: Optimizer, saved: Mapping[str, Any]) -> Any:
    """Return a scheduler's saved state with a value for each of the optimizer's groups, where their number has changed."""
    saved_groups = saved["param_groups"]
    firsts = [group["params"][0] for group in regrouped(optimizer, saved)]
    sources = [next(index for index, group in enumerate(saved_groups) if first in group["params"]) for first in firsts]
    return state if len(sources) == len(saved_groups) else _select_groups(state, sources, len(saved_groups))


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> list[str]:
    """Load an optimizer's state in the types that it was saved in. Where the config differs it wins, and a line is returned for each."""
    saved = {**saved, "param_groups": regrouped(optimizer, saved)}
    differences, groups = [], optimizer.param_groups
    configured = [{key: group[key] for key in _CONFIGURED if key in group} for group in groups]
    for number, (settings, group) in enumerate(zip(configured, saved["param_groups"], strict=True)):
        for key, value in settings.items():
            if key in group and group[key] != value:
                differences.append(f"optimizer group {number}: {key} is {value} as configured; the checkpoint had {group[key]}")
    optimizer.state.clear()  # after a rewind the old state leaves the device before the new one is loaded
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    for number, parameter in zip(numbers, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=True):
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not isinstance(loaded.get(key), Tensor):
                continue
            if loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)  # torch has silently cast it to the parameter's type
            if value.shape == parameter.shape and loaded[key].stride() != parameter.stride():
                # Files are contiguous; a fused kernel needs the strides of the parameter (`precision.channels_last`).
                loaded[key] = torch.empty_like(parameter, dtype=loaded[key].dtype, requires_grad=False).copy_(loaded[key])
    return differences


def _select_groups(state: Any, sources: list[int], size: int) -> Any:
    """Return a scheduler's state with the values of the groups `sources` in every list that has one for each of `size` groups."""
    if isinstance(state, Mapping):
        return {
            key: [value[source] for source in sources]
            if key in _PER_GROUP and isinstance(value, list) and len(value) == size
            else _select_groups(value, sources, size)
            for key, value in state.items()
        }
    return [_select_groups(inner, sources, size) for inner in state] if isinstance(state, list) else state


def _saved_class_name(optimizer: Optimizer) -> str:
    """Return the full name of the class in whose format an optimizer's state is saved: its own, or `saved_as` (`AdamW.saved_as`)."""
    kind = getattr(optimizer, "saved_as", type(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"
