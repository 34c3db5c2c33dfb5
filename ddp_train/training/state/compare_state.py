"""What a checkpoint holds beside what a run has: all that is missing, left over or different, and what the config changes on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces import describe, named_parameters

_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")  # in the state of torch's schedulers


def compare_model(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Return every key that the model misses, does not have, or has in another shape or type."""
    own: Mapping[str, Any] = model.state_dict()
    problems = [f"{name} is missing in the checkpoint" for name in own if name not in saved]
    problems += [f"{name} is in the checkpoint, and not in the model" for name in saved if name not in own]
    for name in own:
        mine, theirs = own[name], saved.get(name)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and describe(mine) != describe(theirs):
            problems.append(f"{name} is {describe(theirs)} in the checkpoint, and {describe(mine)} in the model")
    return problems


def compare_optimizer(optimizer: Optimizer, shared: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return in what the optimizer is another one.

    Args:
        names: of its parameters, in the order of its groups (`parameter_names`).
    """
    if class_of(optimizer) != shared["optimizer_class"]:
        return [f"the optimizer was {shared['optimizer_class']}, and is {class_of(optimizer)}"]
    groups = regrouped(optimizer, shared["optimizer"])
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if mine != theirs:
        return [f"the optimizer's groups had {theirs} parameters, and have {mine}"]
    places = zip(names, shared["optimizer_parameters"], strict=True)
    other = next(((now, then) for now, then in places if now != then), None)
    return [f"the optimizer had the parameters in another order: {other[1]} where {other[0]} is now"] if other else []


def parameter_names(optimizer: Optimizer, trained: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its groups: its state knows them by their places alone."""
    names = {parameter: name for name, parameter in named_parameters(trained).items()}
    return [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]


def regrouped(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's saved state, cut as the optimizer's are.

    Without weight decay there is one group where there are two otherwise (`optimizer.parameter_groups`), of the same parameters in the same
    order. Groups that differ in more come back as they are.
    """
    numbers = [(number, group) for group in saved["param_groups"] for number in group["params"]]
    groups: list[dict[str, Any]] = []
    for mine in optimizer.param_groups:
        part, numbers = numbers[: len(mine["params"])], numbers[len(mine["params"]) :]
        if not part or part[0][1].keys() != mine.keys() or any(_rest(group) != _rest(part[0][1]) for _, group in part):
            return list(saved["param_groups"])
        groups.append({**part[0][1], "params": [number for number, _ in part]})
    return list(saved["param_groups"]) if numbers else groups


def regrouped_schedule(state: Any, optimizer: Optimizer, saved: Mapping[str, Any]) -> Any:
    """Return a scheduler's saved state with a value for each of the optimizer's groups, where these are cut otherwise than they were."""
    before = saved["param_groups"]
    firsts = [group["params"][0] for group in regrouped(optimizer, saved)]
    places = [next(place for place, group in enumerate(before) if first in group["params"]) for first in firsts]
    return state if len(places) == len(before) else _put_in_places(state, places, len(before))


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> list[str]:
    """Load an optimizer's state in the types that it was saved in; where the config differs from what was saved, the config wins.

    Returns:
        A line for each such difference.
    """
    saved = {**saved, "param_groups": regrouped(optimizer, saved)}
    differences, groups = [], optimizer.param_groups
    configured = [{key: group[key] for key in _CONFIGURED if key in group} for group in groups]
    for number, (wanted, group) in enumerate(zip(configured, saved["param_groups"], strict=True)):
        for key, value in wanted.items():
            if key in group and group[key] != value:
                differences.append(f"optimizer group {number}: {key} is {value} as configured; the checkpoint had {group[key]}")
    optimizer.state.clear()  # of a run that goes back: its old state leaves the device before the new one comes
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    for number, parameter in _numbered(optimizer, saved["param_groups"]):
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not isinstance(loaded.get(key), Tensor):
                continue
            if loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)  # torch has cast it to the parameter's type without a word
            if value.shape == parameter.shape and loaded[key].stride() != parameter.stride():
                # Files have elements in their order; a fused kernel takes each by its place in memory (`precision.channels_last`).
                loaded[key] = torch.empty_like(parameter, dtype=loaded[key].dtype, requires_grad=False).copy_(loaded[key])
    return differences


def _put_in_places(state: Any, places: list[int], size: int) -> Any:
    if isinstance(state, Mapping):
        return {
            key: [value[place] for place in places]
            if key in _PER_GROUP and isinstance(value, list) and len(value) == size
            else _put_in_places(value, places, size)
            for key, value in state.items()
        }
    return [_put_in_places(each, places, size) for each in state] if isinstance(state, list) else state


def _rest(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the two groups of one optimizer have in common."""
    return {key: value for key, value in group.items() if key not in ("params", "weight_decay")}


def _numbered(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    """Return the optimizer's parameters, each with its number in saved groups."""
    numbers = chain.from_iterable(group["params"] for group in groups)
    return zip(numbers, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=True)


def class_of(value: object) -> str:
    """Return the full name of the class whose state a value's is: its own, or that which it says (`AdamW.saved_as`)."""
    kind = getattr(value, "saved_as", type(value))
    return f"{kind.__module__}.{kind.__qualname__}"
