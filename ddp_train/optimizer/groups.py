"""Which parameters get which rate and decay: `optimizer.groups`, `optimizer.layer_decay`, and no decay for biases and norms.

A saved state of an optimizer is compared with it, and loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.errors import ConfigError
from ddp_train.interfaces import LossModule
from ddp_train.interfaces.parameters import matching, named_parameters
from ddp_train.traits import OptimizerConstants, constants_of

REST = "rest"  # the group of all other parameters
Groups = Mapping[str, Mapping[str, Any]]
"""Name -> `match` (one pattern or several for `matching`), `freeze`, and arguments of the optimizer that differ in this group."""
_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's


def freeze(trained_module: nn.Module, groups: Groups) -> None:
    """Stop training the parameters of groups with `freeze: true`; called before the strategy prepares the model."""
    named = named_parameters(trained_module)
    for group, names in _assign(named, groups).items():
        if groups[group].get("freeze"):
            for name in names:
                named[name].requires_grad_(False)


def parameter_groups(
    trained_module: nn.Module,
    weight_decay: float | None,
    *,
    groups: Groups | None = None,
    layer_decay: float | None = None,
    lr: float | None = None,
) -> list[dict[str, Any]]:
    """Sort the trained parameters into an optimizer's groups, each into exactly one.

    In each group parameters with two or more dimensions are decayed; biases and norm weights are not. Frozen parameters are left out; tied
    ones come once. Empty groups are left out, and without decay one group replaces the two: a fused optimizer runs a kernel for each.

    Args:
        trained_module: after the strategy has prepared it.
        weight_decay: of the matrices; None: the optimizer has no such argument, and groups are not split by it.
        groups: parameters that differ. A parameter is in the first group that matches; all others are in `rest`, which comes first.
        layer_decay: factor of the rate from one layer to the one below it; a group with an `lr` keeps that.
        lr: of the last layer; needed with `layer_decay`.

    Returns groups for the first argument of a torch optimizer; with `groups` or `layer_decay` each has its `name`.
    """
    named = named_parameters(trained_module)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(key="model", happened="no parameter is trainable", expected="one with requires_grad", fix="unfreeze a layer")
    if not groups and layer_decay is None:
        return split_by_decay([parameter for parameter in named.values() if parameter.requires_grad], weight_decay)
    factors = rate_factors(trained_module, layer_decay) if layer_decay is not None else {}
    chosen = _assign(named, groups or {})
    grouped = {name for names in chosen.values() for name in names}
    result: list[dict[str, Any]] = []
    for group, names in {REST: [name for name in named if name not in grouped], **chosen}.items():
        options = {key: value for key, value in (groups or {}).get(group, {}).items() if key not in ("match", "freeze")}
        group_decay = options.pop("weight_decay", None)
        decay = weight_decay if group_decay is None else group_decay
        trained_names = [name for name in names if named[name].requires_grad]
        if not trained_names and options:
            raise ConfigError(key=f"optimizer.groups.{group}", happened="all parameters that it matches are frozen", fix="leave it out")
        if group_decay and trained_names and all(named[name].ndim < 2 for name in trained_names):
            happened = f"is {group_decay}, and all parameters that it matches are biases and norm weights, which are never decayed"
            expected = "a group with a parameter of two dimensions or more"
            raise ConfigError(key=f"optimizer.groups.{group}.weight_decay", happened=happened, expected=expected, fix="leave it out")
        by_factor: dict[float, list[nn.Parameter]] = {}
        for name in trained_names:
            by_factor.setdefault(1.0 if "lr" in options else factors.get(name, 1.0), []).append(named[name])
        for factor in sorted(by_factor, reverse=True):  # the last layer first: its rate is shown
            rate = {"lr": factor * lr} if factors and lr is not None and "lr" not in options else {}
            result += [{**split, **rate, **options, "name": group} for split in split_by_decay(by_factor[factor], decay)]
    return result


def split_by_decay(parameters: list[nn.Parameter], weight_decay: float | None) -> list[dict[str, Any]]:
    """Return a group of decayed and one of other parameters; weight_decay=None: the optimizer does not decay."""
    if weight_decay is None:
        return [{"params": parameters}]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    if weight_decay == 0:
        return [{"params": decayed + others, "weight_decay": 0.0}]  # in the order of two groups, by which a checkpoint identifies them
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _assign(named: Mapping[str, nn.Parameter], groups: Groups) -> dict[str, list[str]]:
    assigned: dict[str, list[str]] = {}
    grouped: set[str] = set()
    for group, options in groups.items():
        key = f"optimizer.groups.{group}.match"
        patterns = [options["match"]] if isinstance(options["match"], str) else options["match"]
        chosen = matching(named, patterns, key=key)
        if chosen <= grouped:
            first = next(other for other, names in assigned.items() if chosen & set(names))
            happened = f"all parameters that it matches are in earlier groups ({first})"
            fix = f"put {group} before {first}, or use another pattern"
            raise ConfigError(key=key, happened=happened, expected="at least one parameter that no earlier group has", fix=fix)
        assigned[group] = [name for name in named if name in chosen - grouped]
        grouped |= chosen
    return assigned


def rate_factors(trained_module: nn.Module, decay: float) -> dict[str, float]:
    """Return each parameter's factor of the rate, by name: 1 in the last layer, `decay` in the one before, and so on.

    A layer is an item of an outermost `nn.ModuleList` or `nn.Sequential`; one without a matrix (a norm) belongs to the item before it. The
    parameters before the first item (embeddings) are a layer; those after the last item (final norm, head, objective) are the last one.

    Source: Clark et al. 2020, arXiv:2003.10555 (ELECTRA, appendix A); Bao et al. 2021, arXiv:2106.08254 (BEiT).
    """
    model = trained_module.model if isinstance(trained_module, LossModule) else trained_module
    layer_numbers = _layer_numbers(model)
    last = max(layer_numbers.values(), default=0)
    if last == 0:
        happened = f"{type(model).__name__} has no sequence of layers"
        expected = "an nn.ModuleList or nn.Sequential of at least two layers with parameters"
        fix = "optimizer.layer_decay=null, and optimizer.groups for parts with their own learning rate"
        raise ConfigError(key="optimizer.layer_decay", happened=happened, expected=expected, fix=fix)
    return {name: decay ** (last - layer_numbers.get(name, last)) for name in named_parameters(trained_module)}


def _layer_numbers(model: nn.Module) -> dict[str, int]:
    stacks, named = list(_stacks(model, "")), named_parameters(model)
    layers: dict[str, tuple[str, str]] = {}
    for name in named:
        stack = next((stack for stack in stacks if name.startswith(stack)), None)
        layers[name] = ("", "") if stack is None else (stack, name.removeprefix(stack).partition(".")[0])
    with_matrix = {layer for name, layer in layers.items() if named[name].ndim > 1}
    numbers: dict[str, int] = {}
    number, previous = 0, None
    for name, layer in layers.items():
        is_in_stack = previous is not None and layer[1] and layer[0] == previous[0]
        joins_previous = is_in_stack and layer not in with_matrix  # a norm after its convolution
        if previous is not None and layer != previous and not joins_previous:
            number += 1
        numbers[name] = number
        previous = previous if joins_previous else layer
    return numbers


def _stacks(module: nn.Module, prefix: str) -> Iterator[str]:
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        yield prefix
        return
    for name, child in children:
        yield from _stacks(child, f"{prefix}{name}.")


def saved_class(optimizer: Optimizer) -> str:
    """Return the full name of the class in whose format an optimizer's state is saved: its own, or `saved_as`."""
    kind = type(optimizer)
    return constants_of(kind, OptimizerConstants).saved_as or f"{kind.__module__}.{kind.__qualname__}"


def parameter_names(optimizer: Optimizer, trained_module: nn.Module) -> list[str]:
    """Return the names of the parameters in an optimizer's groups, in their order; "" for one of another module."""
    names = {parameter: name for name, parameter in named_parameters(trained_module).items()}
    return [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]


def compare_optimizer(optimizer: Optimizer, module: nn.Module, saved: Mapping[str, Any], *, kind: str, names: Sequence[str]) -> list[str]:
    """Return the difference between an optimizer and a saved state; `kind` and `names` are its `saved_class` and `parameter_names`."""
    if (present := saved_class(optimizer)) != kind:
        return [f"the optimizer was {kind}, and is {present}"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != saved_sizes:
        return [f"the optimizer's groups had {saved_sizes} parameters, and have {sizes}"]
    pairs = zip(parameter_names(optimizer, module), names, strict=True)
    other = next(((name, saved_name) for name, saved_name in pairs if name != saved_name), None)
    return [f"the optimizer had the parameters in another order: {other[1]} where {other[0]} is now"] if other else []


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> list[str]:
    """Load an optimizer's state in the types that it was saved in. Where the config differs it wins, and a line is returned for each."""
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
