"""The content of a checkpoint: `checkpoint_content` saves the parts of a run that have a state, and `start_from` loads them.

A part whose state is the same on every rank, and small, is added to `shared_parts` alone: rank 0 writes it. Any other part is added to both
of these functions; `checkpoint_content` has those whose tensors all ranks share out in `alike`.

An optimizer's state is compared with the optimizer, split as its groups are, and loaded; so is the schedule of its groups.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.checkpoint import codec
from ddp_train.checkpoint.codec import Leaf
from ddp_train.checkpoint.layout import ALIKE, OF_RANK_0
from ddp_train.checkpoint.read import read_own, read_shared, size_of
from ddp_train.checkpoint.save import Content
from ddp_train.distributed.world import World
from ddp_train.errors import UserError
from ddp_train.interfaces.batch import map_tensors, tensors_of
from ddp_train.interfaces.parameters import named_parameters, plain_name
from ddp_train.interfaces.strategy import MemoryKey, is_sharded, memory_key
from ddp_train.training.parts.components import Components, callback_states, load_callback_states
from ddp_train.training.parts.evaluated_weights import KeptWeights, averages, training_mode
from ddp_train.training.seeding import random_state, set_random_state
from ddp_train.training.state import data_identity
from ddp_train.training.state.weights import AVERAGES, compare_model, put_state, sharded_weights
from ddp_train.training.train_state import TrainState, WindowSums
from ddp_train.traits import OptimizerConstants, constants_of

_NONE = KeptWeights()
PARAMETERS = "optimizer_parameters"
"""The key of a checkpoint with the names of an optimizer's parameters, in the order of its groups: its state has only their numbers."""
_CLASS = "optimizer_class"
_CONFIGURED = ("weight_decay", "eps")  # hyper-parameters that no schedule changes; the learning rate is the scheduler's
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")  # in the state of torch's schedulers


def shared_parts(components: Components, state: TrainState) -> dict[str, Any]:
    """Return the objects whose state is the same on every rank, without modules and optimizer, whose keys are compared on loading."""
    return {"scheduler": components.scheduler, "scaler": components.scaler, "state": state}


def hashes(components: Components, state: TrainState) -> dict[str, str]:
    """Return a hash of each part: all ranks should have the same, and no collective keeps them the same."""
    hash_of = {}
    for name, part in shared_parts(components, state).items():
        plain, tensors = codec.encode(part.state_dict(), name)
        digest = xxhash.xxh3_128(json.dumps(plain, sort_keys=True).encode())
        for tensor in tensors.values():
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        hash_of[name] = digest.hexdigest()
    return hash_of


def checkpoint_content(components: Components, state: TrainState, window: WindowSums, world: World, kept: KeptWeights = _NONE) -> Content:
    """Return the content of a checkpoint that is saved now. Collective.

    First all ranks copy rank 0's buffers: each rank has its own BatchNorm averages and would write a part of them. So a rank goes on with
    what the checkpoint holds. Under DDP this changes nothing: its next step begins with rank 0's buffers anyway.
    """
    world.copy_from_main(components.trained_module.buffers())
    modules = components.modules.items()
    states = {name: module.state_dict() for name, module in modules}
    strategy, optimizer = components.strategy, optimizer_content(components.optimizer, components.trained_module)
    is_replica = strategy.local_weights is not None and world.size > 1  # then weights are each rank's own, and rank 0's are in `shared`
    strategy_state = {"strategy": saved_strategy} if (saved_strategy := strategy.state_dict()) else {}
    alike: dict[str, Any] = {**states, **({} if is_replica else optimizer), **({} if strategy.state_is_per_rank else strategy_state)}
    if kept.parameters:
        alike["parameters_in_training"] = list(kept.parameters)
    shared = {
        **states,
        **optimizer,  # before what may have the same tensors: the first name of a tensor is the one it is saved by
        **alike,
        # The versions of the modules' own formats, which torch keeps as an attribute of a state_dict.
        **{f"{name}_versions": getattr(module_state, "_metadata", {}) for name, module_state in states.items()},
        **{name: part.state_dict() for name, part in shared_parts(components, state).items()},
        "callbacks": callback_states(components, world),
        # These are evaluated instead of the weights. A callback's state has the same tensors; the files have them once.
        AVERAGES: dict(averages(components)),
        data_identity.PART: components.data_identity,
        ALIKE: [*alike],
        OF_RANK_0: ["optimizer"] if is_replica else [],
    }
    own = {
        "random": random_state(world.device),
        "window": asdict(window),
        "loader": components.train_loader.state_dict(state.samples),
        **({"replica": _replica(shared, kept.own_values, world)} if is_replica else {}),
        **(strategy_state if strategy.state_is_per_rank else {}),
    }
    buffers = {f"{part}.{name}" for part, module in modules for name, _ in module.named_buffers(remove_duplicate=False)}  # or masks
    return Content(step=state.step, shared=shared, own=own, may_be_infinite=lambda name: name in buffers)


def _replica(shared: Mapping[str, Any], kept: Mapping[MemoryKey, Tensor], world: World) -> dict[str, Any]:
    """Return the parts of the state that differ on this rank from the shared state, which has rank 0's optimizer."""
    replica = {} if world.is_main else {"optimizer": shared["optimizer"]}
    for part in ("model", "objective", "callbacks"):
        rank_part = map_tensors(lambda tensor: kept.get(memory_key(tensor), tensor), shared.get(part, {}))
        if any(mine is not common for mine, common in zip(tensors_of(rank_part), tensors_of(shared.get(part, {})), strict=True)):
            replica[part] = rank_part
    return replica


def start_from(
    checkpoint: Path | None, components: Components, state: TrainState, world: World, *, on_progress: Callable[[], None] = lambda: None
) -> bool:
    """Put a verified checkpoint into the components (None: they stay as they are), and let the strategy start there. Collective.

    `on_progress` is called while this rank reads. Returns whether the random streams are those of the run; with another world size they
    cannot come back. Raises CheckpointError: it is not what its format says. UserError: it is of another model or optimizer.
    """
    strategy = components.strategy
    if checkpoint is None:
        strategy.start_training(components.trained_module, {}, weights_are_equal=True)
        return True
    saved_size = size_of(checkpoint, world)
    shared = read_shared(checkpoint, world, lay_out=partial(_sharded_like, components), on_progress=on_progress)
    own = read_own(checkpoint, world.rank) if saved_size == world.size else {}
    replica = {} if strategy.local_weights is None else own.get("replica", {})
    if shared.get(OF_RANK_0) and (strategy.local_weights is None or not own):
        world.print("the checkpoint has weights and an optimizer for each rank: all continue with the mean weights and rank 0's optimizer")
    _load_shared(checkpoint, shared | replica, components, state, world)
    strategy_state = (own if strategy.state_is_per_rank else shared).get("strategy", {})
    strategy.start_training(components.trained_module, strategy_state, weights_are_equal=replica.keys().isdisjoint(components.modules))
    if saved_size == world.size:
        state.window = WindowSums(**own["window"])
        components.train_loader.load_state_dict(own["loader"])
        set_random_state(own["random"], world.device)
        return True
    if components.scaler.is_enabled():  # the scale times the number of ranks stays (amp.py)
        components.scaler.load_state_dict({**shared["scaler"], "scale": shared["scaler"]["scale"] * saved_size / world.size})
    windows = [WindowSums(**read_own(checkpoint, rank)["window"]) for rank in range(saved_size if world.is_main else 1)]
    state.window = WindowSums.merged(windows, is_main=world.is_main)
    return False


def _load_shared(checkpoint: Path, shared: Mapping[str, Any], components: Components, state: TrainState, world: World) -> None:
    optimizer, modules = components.optimizer, components.modules
    problems = compare_model(components.model, shared["model"])
    objective = compare_model(modules.get("objective", nn.Module()), shared.get("objective", {}))  # it may have no state
    problems += [f"of the objective: {problem}" for problem in objective]
    problems += compare_optimizer(optimizer, components.trained_module, shared)
    if not problems:
        try:
            for name, module in modules.items():
                put_state(module, shared[name], shared[f"{name}_versions"])
            schedule = regrouped_schedule(shared["scheduler"], optimizer, shared["optimizer"])
            rates = [float(group["lr"]) for group in regrouped(optimizer, shared["optimizer"])]
            differences = load_optimizer(optimizer, shared["optimizer"])
            training_mode(optimizer, shared.get("parameters_in_training", ()))
            for name, part in shared_parts(components, state).items():
                part.load_state_dict(schedule if name == "scheduler" else shared[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problems = [f"{type(error).__name__}: {error}"]
    if problems:
        happened = "\n    ".join([f"{checkpoint} does not fit this model and optimizer:", *problems])
        fix = "resume=never, or the configuration that it was saved with"
        raise UserError(key="resume", happened=happened, expected="a checkpoint of the same configuration", fix=fix)
    differences += _compare_rates(rates, [float(group["lr"]) for group in optimizer.param_groups])
    differences += load_callback_states(components, shared["callbacks"])
    world.print(*differences)


def _compare_rates(saved: list[float], current: list[float]) -> list[str]:
    """Return a line where the learning rate differs from the checkpoint's: the run has another length, or rate."""
    for old, new in zip(saved, current, strict=False):
        if not math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-15):
            return [
                f"rate     the learning rate goes from {old:.4g} to {new:.4g} here: the result differs from that of a run that began with"
                " these settings; scheduler=constant, and warmup_stable_decay before its decay, have no such jump"
            ]
    return []


def _sharded_like(components: Components, plain: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Tensor]:
    """Return, for `read_shared`, the run's own tensor for each tensor of a checkpoint that is to be sharded among the ranks like it."""
    layouts, weights = {}, dict(sharded_weights(components.modules))
    parameters, names = named_parameters(components.trained_module), plain.get(PARAMETERS)
    numbered = {str(number): parameters.get(str(name)) for number, name in enumerate(names)} if isinstance(names, list) else {}
    averaged = {plain_name(name): parameter for name, parameter in components.model.named_parameters()}
    averaging = components.averaging
    for name, leaf in leaves.items():
        like: Tensor | None = None
        match name.split("."):
            case [_, "optimizer", "state", number, *_]:
                if (parameter := numbered.get(number)) is not None:
                    like = components.optimizer_shards.get(parameter, parameter)
            case [_, "parameters_in_training", number, *_]:
                like = numbered.get(number)
            case [_, "callbacks", callback, *path] if callback == averaging:  # it has the model's names behind some of its own
                suffixes = (".".join(path[start:]) for start in range(len(path)))
                like = next((averaged[suffix] for suffix in suffixes if suffix in averaged), None)
            case _:
                like = weights.get(name)
        if like is not None and is_sharded(like) and tuple(like.shape) == leaf.shape:
            layouts[name] = like
    return layouts


def optimizer_content(optimizer: Optimizer, trained_module: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint has of an optimizer."""
    names = _parameter_names(optimizer, trained_module)
    return {"optimizer": optimizer.state_dict(), _CLASS: _saved_class_name(optimizer), PARAMETERS: names}


def compare_optimizer(optimizer: Optimizer, trained_module: nn.Module, shared: Mapping[str, Any]) -> list[str]:
    """Return the difference between the optimizer and the saved one."""
    if _saved_class_name(optimizer) != shared[_CLASS]:
        return [f"the optimizer was {shared[_CLASS]}, and is {_saved_class_name(optimizer)}"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in regrouped(optimizer, shared["optimizer"])]
    if sizes != saved_sizes:
        return [f"the optimizer's groups had {saved_sizes} parameters, and have {sizes}"]
    pairs = zip(_parameter_names(optimizer, trained_module), shared[PARAMETERS], strict=True)
    other = next(((name, saved_name) for name, saved_name in pairs if name != saved_name), None)
    return [f"the optimizer had the parameters in another order: {other[1]} where {other[0]} is now"] if other else []


def _parameter_names(optimizer: Optimizer, trained_module: nn.Module) -> list[str]:
    names = {parameter: name for name, parameter in named_parameters(trained_module).items()}
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
    """Return the full name of the class in whose format an optimizer's state is saved: its own, or `saved_as`."""
    kind = type(optimizer)
    return constants_of(kind, OptimizerConstants).saved_as or f"{kind.__module__}.{kind.__qualname__}"
