"""The weights that are evaluated and saved, where they are not those that a run trains: averages, a mean over the ranks, two modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.errors import ConfigError
from ddp_train.interfaces.batch import describe
from ddp_train.interfaces.run import callback_errors
from ddp_train.interfaces.strategy import MemoryKey, is_sharded, local_rows, shard_like
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.traits import has_modes


@contextmanager
def weights_to_evaluate(components: Components) -> Iterator[KeptWeights]:
    """Give the model the weights to evaluate and to save, the same on all ranks, and afterwards those to train. Collective.

    They differ where the optimizer has both (`evaluation_mode`), and where ranks take steps of their own.
    """
    with (
        evaluation_mode(components.optimizer) as parameters,
        components.strategy.mean_over_ranks(components.trained_module, averages(components).values()) as own_values,
    ):
        yield KeptWeights(parameters=parameters, own_values=own_values)


@dataclass(frozen=True, kw_only=True)
class KeptWeights:
    """The values that this rank goes on training with, while the model has others to be evaluated or saved."""

    parameters: Sequence[Tensor] = ()  # as they are in training, from `evaluation_mode`
    own_values: Mapping[MemoryKey, Tensor] = field(default_factory=dict)  # of this rank, while the model has those that all ranks share


@contextmanager
def evaluation_mode(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Give the parameters the values to evaluate and to save, and afterwards those to train, bit for bit.

    They differ with schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), which have two methods, `train()` and `eval()`, that
    change the parameters in place. The way there and back rounds: a run with one more save would differ in the last bits. So the trained
    weights are kept meanwhile, and a checkpoint holds both.

    Yields:
        The trained weights, in the order of the optimizer's groups; none where both are the same. An error inside ends the run.
    """
    if not has_modes(optimizer):
        yield []
        return
    kept = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    cast(Any, optimizer).eval()
    yield kept
    training_mode(optimizer, kept)


def training_mode(optimizer: Optimizer, trained: Sequence[Tensor] = ()) -> None:
    """Give the parameters the values to train: those that `evaluation_mode` yields, or the optimizer's."""
    if has_modes(optimizer):
        cast(Any, optimizer).train()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=bool(trained)):
                parameter.copy_(value)


def averages(components: EvaluationComponents) -> Mapping[str, Tensor]:
    """Return a callback's averaged weights for evaluation, by the model's names and with its shapes; {} where there are none."""
    name = components.averaging
    if name is None:
        return {}
    with callback_errors(name, "evaluation_weights"):
        weights = components.callbacks[name].evaluation_weights() or {}
    tensors = _tensors(components.model)
    for key, weight in weights.items():
        if key not in tensors or not isinstance(weight, Tensor) or weight.shape != tensors[key].shape:
            happened = f"its evaluation_weights() gives {key}: {describe(weight)}, which is {describe(tensors.get(key))} in the model"
            expected = "tensors with the names and shapes of the model's parameters and buffers"
            raise ConfigError(key=f"callbacks.{name}", happened=happened, expected=expected)
    return weights


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


@contextmanager
def averaged_weights(components: EvaluationComponents) -> Iterator[None]:
    """Give the model a callback's averaged weights, if any, and afterwards its own. An error ends the run.

    Where the types are the same, tensors are exchanged and not copied: so averages of buffers become rank 0's, too. Rows of tensors that
    are sharded among the ranks are copied.
    """
    weights = averages(components)
    if not weights:
        yield
        return
    tensors = _tensors(components.model)
    originals = {name: tensors[name].data for name in weights if not is_sharded(tensors[name])}
    shards = {name: local_rows(tensors[name]) for name in weights if is_sharded(tensors[name])}  # a strategy may use their memory directly
    copies = {name: rows.clone() for name, rows in shards.items()}
    for name in originals:
        tensors[name].data = weights[name].to(tensors[name].device, tensors[name].dtype)
    for name, rows in shards.items():
        rows.copy_(local_rows(shard_like(weights[name], tensors[name])))
    yield
    for name, original in originals.items():
        tensors[name].data = original
    for name, copy in copies.items():
        shards[name].copy_(copy)
