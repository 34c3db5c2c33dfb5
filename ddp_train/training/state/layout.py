"""How the tensors of a checkpoint lie among the ranks of this run, whatever wrote it: as the model's, and as those of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ddp_train.checkpoint.codec import Leaf
from ddp_train.checkpoint.snapshot import SHARED
from ddp_train.interfaces import Averaging, is_cut, named_parameters, plain_name
from ddp_train.training.parts.components import Components
from ddp_train.training.state.weights import cut_weights


def cut_like(components: Components) -> Callable[[Mapping[str, Any], Mapping[str, Leaf]], dict[str, Tensor]]:
    """Return what tells of a checkpoint's tensors which come back cut among the ranks, and like which of the run's (`read_shared`)."""

    def lay_out(plain: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Tensor]:
        wanted = dict(cut_weights(components.modules))
        parameters = named_parameters(components.trained)
        names = plain.get("optimizer_parameters", [])
        averaged = {plain_name(name): parameter for name, parameter in components.model.named_parameters()}
        averaging = [f"{SHARED}.callbacks.{name}." for name, each in components.callbacks.items() if isinstance(each, Averaging)]
        found = {}
        for name, leaf in leaves.items():
            like = wanted.get(name)
            if name.startswith(f"{SHARED}.optimizer.state."):
                parameter = _numbered(name.split(".")[3], names, parameters)
                like = None if parameter is None else components.strategy.state_like(parameter)
            elif name.startswith(f"{SHARED}.parameters_in_training."):
                like = _numbered(name.split(".")[2], names, parameters)
            elif prefix := next((prefix for prefix in averaging if name.startswith(prefix)), None):
                like = next((averaged[end] for end in _ends(name.removeprefix(prefix)) if end in averaged), None)
            if like is not None and is_cut(like) and tuple(like.shape) == leaf.shape:
                found[name] = like
        return found

    return lay_out


def _numbered(number: str, names: Any, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """Return the parameter that had a number in the saved optimizer; None: the checkpoint does not say, or it is gone."""
    is_known = number.isdecimal() and isinstance(names, list) and int(number) < len(names)
    return parameters.get(str(names[int(number)])) if is_known else None


def _ends(name: str) -> Iterator[str]:
    """Yield what may be a parameter's name at the end of another one, the longest first."""
    while name:
        yield name
        name = name.partition(".")[2]
