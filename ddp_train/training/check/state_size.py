"""How large a checkpoint will be, whether its files can name all tensors, and what a rank keeps: found out before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.codec import leaf_of
from ddp_train.checkpoint.snapshot import SHARED, divide_shared
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Averaging, is_cut, own_rows, range_of
from ddp_train.training.check.memory import kept_for
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluation_mode import has_modes

_BYTES_PER_RANK = 1 << 16  # random streams and the position in the data; manifests and headers come to less


def estimate(components: Components, *, num_ranks: int) -> int:
    """Return how many bytes a checkpoint will have: the tensors of model, optimizer and callbacks, and a little for each rank.

    Those count, too, that the optimizer makes in its first step, and a callback that averages the weights in its `start`.

    Raises:
        ConfigError: there are too many tensors; no checkpoint could name them.
    """
    states = {part: module.state_dict().items() for part, module in components.modules.items()}
    model = {f"{part}.{name}": value for part, items in states.items() for name, value in items if isinstance(value, Tensor)}
    weights = {own_rows(tensor).untyped_storage()._cdata: tensor.nbytes for tensor in model.values()}  # tied ones once; on meta no memory
    parameters = [(parameter, group) for group in components.optimizer.param_groups for parameter in group["params"]]
    optimizer = {
        f"optimizer.state.{number}.{name}": value
        for number, (parameter, group) in enumerate(parameters)
        for name, value in _kept(parameter, group, components.optimizer).items()
    }
    carried = _carried(components)
    leaves = [leaf_of(f"{SHARED}.{name}", _whole(value)) for name, value in (model | optimizer | carried).items()]
    try:
        for pieces in divide_shared(leaves, num_ranks):
            tensor_file.make_header([(piece.name, piece.dtype, piece.shape) for piece in pieces])
    except tensor_file.TensorFileError as error:
        raise ConfigError(
            key="model",
            happened=f"{len(model):,} tensors of the model and {len(optimizer):,} of the optimizer are too many: {error.happened}",
            expected=f"{error.expected}, some 150,000 tensors for each rank's file",
            fix="layers or experts that are alike in one parameter, [EXPERTS, ...]; or more ranks, of which each writes a share",
        ) from None
    twice = (
        sum(parameter.nbytes for parameter, _ in parameters) if has_modes(components.optimizer) else 0
    )  # evaluated ones and trained ones
    kept = _bytes(optimizer | carried)
    own = _of_replicas(components, sum(weights.values()) + _bytes(carried), _bytes(optimizer), num_ranks=num_ranks)
    return sum(weights.values()) + twice + kept + own + num_ranks * _BYTES_PER_RANK


def share_of(components: Components, world: World) -> int:
    """Return about how many bytes of a checkpoint this rank writes: an equal part, and rank 0 all that callbacks keep of a whole model."""
    of_rank_0 = 0 if components.computes_together else _bytes(_carried(components))
    return (estimate(components, num_ranks=world.size) - of_rank_0) // world.size + (of_rank_0 if world.is_main else 0)


def _of_replicas(components: Components, weights: int, optimizer: int, *, num_ranks: int) -> int:
    """Return what ranks save besides as their own; of steps of their own at most each its weights, all but rank 0 its optimizer."""
    if not components.strategy.has_local_weights:
        return num_ranks * _for_next_exchange(components, num_ranks)
    own = num_ranks * weights + (num_ranks - 1) * optimizer if num_ranks > 1 else 0
    return own + _for_next_exchange(components, num_ranks)


def _for_next_exchange(components: Components, num_ranks: int) -> int:
    """Return what a rank keeps for its strategy's next synchronisation, or exchange of gradients."""
    strategy = components.strategy
    held = [*components.trained.parameters(), *components.trained.buffers()]
    copies = strategy.num_copies(num_ranks) * sum(max(4, tensor.itemsize) * tensor.numel() for tensor in held)
    return copies + strategy.num_bytes_kept(components.trained, num_ranks)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def still_to_come(components: Components, *, num_ranks: int = 1) -> int:
    """Return how many bytes of its device a rank will have, from its first step on, beside those that it has.

    These are the optimizer's state, as the strategy cuts it, the averages of a callback that are made when training begins, and what a
    strategy keeps from one synchronisation of its ranks, or exchange of gradients, to the next.
    """
    optimizer, strategy = components.optimizer, components.strategy
    if strategy.shards(2).on_host and any(is_cut(parameter) for parameter in components.model.parameters()):
        return 0
    state = sum(
        own_rows(strategy.state_like(parameter)).numel() * _bytes_per_number(parameter, group, optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    )
    begun = [callback for callback in components.callbacks.values() if isinstance(callback, Averaging)]
    averages = sum(max(4, each.element_size()) * own_rows(each).numel() for each in components.model.parameters()) if begun else 0
    return int(state) + averages + _for_next_exchange(components, num_ranks)


def _bytes_per_number(parameter: Tensor, group: Mapping[str, Any], optimizer: Optimizer) -> float:
    return sum(value.nbytes for value in _kept(parameter, group, optimizer).values()) / max(1, parameter.numel())


def kept_on_a_rank(components: Components, *, num_ranks: int) -> dict[str, int]:
    """Return the bytes that a rank keeps from step to step, by part, of so many: the most of any. Forward and backward come on top.

    The parts are those of `memory.parts_of`, and what callbacks keep. It is asked of a build that is not cut yet, too.
    """
    shards, model = components.strategy.shards(num_ranks), set(components.model.parameters())
    trained = list(components.trained.parameters())
    parameters = sum(_rows(each, shards.parameters if each in model else 1) for each in trained)
    states = [_kept(parameter, group, components.optimizer) for group in components.optimizer.param_groups for parameter in group["params"]]
    averaging = [name for name, each in components.callbacks.items() if isinstance(each, Averaging)]
    return {
        "parameters": parameters + sum(buffer.nbytes for buffer in components.trained.buffers()),
        "gradients": sum(_rows(each, shards.gradients) for each in trained if each.requires_grad and components.early_step is None),
        "optimizer": sum(_rows(value, shards.optimizer) for state in states for value in state.values()),
        **({kept_for(components.strategy): copies} if (copies := _for_next_exchange(components, num_ranks)) else {}),
        "callbacks": sum(
            _rows(value, shards.parameters if name.split(".")[1] in averaging else 1) for name, value in _carried(components).items()
        ),
    }


def _rows(tensor: Tensor, shards: int) -> int:
    """Return the bytes of the first of so many shards, which is the largest; a tensor without dimensions is whole on each rank."""
    return tensor.nbytes if shards == 1 or not tensor.ndim else range_of(tensor.shape, shards, 0)[1] * tensor.itemsize


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type without values, which no rank has a part of."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _carried(components: Components) -> dict[str, Tensor]:
    """Return the tensors that callbacks keep, by their names. Averages that are still to come have no values yet: in float32 at least."""
    found: dict[str, Tensor] = {}
    for name, callback in components.callbacks.items():
        if not hasattr(callback, "state_dict"):
            continue
        _, tensors = codec.encode(callback.state_dict(), f"callbacks.{name}")
        if isinstance(callback, Averaging) and not tensors:
            tensors = {
                f"callbacks.{name}.averages.{each}": _whole(parameter).to(torch.promote_types(parameter.dtype, torch.float32))
                for each, parameter in components.model.named_parameters()
            }
        found |= tensors
    return found


def _kept(parameter: Tensor, group: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps for a parameter, by their names.

    Those that it has not made yet stand in it without values: one for momentum, or two averages and a number, as AdamW has them.
    """
    state = optimizer.state.get(parameter)
    if state:
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}
    like = _whole(parameter)
    if "betas" in group:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
        return {"step": torch.empty((), device="meta"), **dict.fromkeys(names, like)}
    if isinstance(optimizer, torch.optim.SGD) or "ns_steps" in group:  # Muon has a momentum, too
        return {"momentum_buffer": like} if group["momentum"] else {}
    return {"average": like, "average_sq": like}
