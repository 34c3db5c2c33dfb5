"""The layers of a model, counted from its input, as layer-wise rates need them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Joint, named_parameters, plain_name


def rate_factors(trained: nn.Module, decay: float) -> dict[str, float]:
    """Return by which factor the rate of each parameter is smaller, by its name: 1 in the last layer, `decay` in the one before, and so on.

    A layer is an item of an outermost `nn.ModuleList` or `nn.Sequential`; one without a matrix (a norm) goes with the item before it. What
    comes before the first of them (embeddings) is a layer, and so is what comes after the last (the final normalisation, the head). An
    objective's own parameters go with the last one.

    Raises:
        ConfigError: the model has no such layers.

    Source: Clark et al. 2020, arXiv:2003.10555 (ELECTRA, appendix A); Bao et al. 2021, arXiv:2106.08254 (BEiT).
    """
    model = trained.model if isinstance(trained, Joint) else trained
    numbers = _numbers(model)
    last = max(numbers.values(), default=0)
    if last == 0:
        raise ConfigError(
            key="optimizer.layer_decay",
            happened=f"{type(model).__name__} has no layers one after another",
            expected="an nn.ModuleList or nn.Sequential of at least two layers with parameters",
            fix="optimizer.layer_decay=null, and optimizer.groups for parts that are to have a rate of their own",
        )
    return {name: decay ** (last - numbers.get(name, last)) for name in named_parameters(trained)}


def _numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's layer, in the order in which the model has them."""
    stacks, named = list(_stacks(model, "")), named_parameters(model)
    layers: dict[str, tuple[str, str]] = {}
    for name in named:
        stack = next((stack for stack in stacks if name.startswith(stack)), None)
        layers[name] = ("", "") if stack is None else (stack, name.removeprefix(stack).partition(".")[0])
    weighty = {layer for name, layer in layers.items() if named[name].ndim > 1}
    numbers: dict[str, int] = {}
    number, before = 0, None
    for name, layer in layers.items():
        is_beside = before is not None and layer[1] and layer[0] == before[0] and layer not in weighty  # a norm after its convolution
        if before is not None and layer != before and not is_beside:
            number += 1
        numbers[name] = number
        before = before if is_beside else layer
    return numbers


def _stacks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the beginning of the names in each outermost sequence of layers."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        yield prefix
        return
    for name, child in children:
        yield from _stacks(child, plain_name(f"{prefix}{name}."))
