"""The content of a checkpoint: `checkpoint_content` makes it from the parts of a run that have a state, and `start_from` loads it."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ddp_train.checkpoint.codec import Leaf, encode
from ddp_train.checkpoint.manifest import CheckpointError
from ddp_train.checkpoint.read import read_own, read_shared, size_of
from ddp_train.checkpoint.save import Content
from ddp_train.distributed.world import World
from ddp_train.errors import RunError, UserError
from ddp_train.interfaces import Callback, SupportsState
from ddp_train.interfaces.batch import map_tensors, tensors_of
from ddp_train.interfaces.parameters import named_parameters
from ddp_train.interfaces.run import callback_errors
from ddp_train.interfaces.strategy import MemoryKey, is_sharded, memory_key
from ddp_train.optimizer.groups import compare_optimizer, load_optimizer, parameter_names, saved_class
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluated_weights import KeptWeights, averages, training_mode
from ddp_train.training.seeding import random_state, set_random_state
from ddp_train.training.state.weights import compare_model, put_states, sharded_weights
from ddp_train.training.train_state import TrainState, WindowSums

_NONE = KeptWeights()
T = TypeVar("T", bound="SharedState | RankState | WindowSums")


@dataclass(frozen=True, kw_only=True)
class SharedState:
    """The state that all ranks share, saved under the fields' names (None: no such part)."""

    model: Mapping[str, Any]
    objective: Mapping[str, Any] | None = None  # of one with weights
    optimizer: dict[str, Any]
    optimizer_class: str
    optimizer_parameters: Sequence[str]  # their names, in the order of the optimizer's groups: its state has only their numbers
    strategy: Mapping[str, Any] | None = None
    parameters_in_training: Sequence[Tensor] | None = None  # where the model has others to be evaluated
    model_versions: Mapping[str, Any]  # of the modules' own formats, which torch keeps as an attribute of a state_dict
    objective_versions: Mapping[str, Any] | None = None
    scheduler: dict[str, Any]
    scaler: dict[str, Any]
    state: dict[str, Any]  # `TrainState`
    callbacks: Mapping[str, Any]  # by name
    averages: Mapping[str, Tensor]  # evaluated instead of the weights. A callback's state has the same tensors; a file has them once
    data_identity: Mapping[str, Any]
    written_in_shares: Sequence[str] = ()  # the parts whose tensors all ranks have: each writes a share of them. Rank 0 writes all others
    of_rank_0: Sequence[str] = ()  # the parts whose tensors each rank has in other shapes, of those that rank 0 writes


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank alone, saved likewise."""

    random: dict[str, Any]
    window: dict[str, Any]  # `WindowSums`
    loader: dict[str, Any]
    replica: Mapping[str, Any] | None = None  # the parts of `SharedState` that differ on this rank, where ranks take steps of their own
    strategy: Mapping[str, Any] | None = None


def checkpoint_content(components: Components, state: TrainState, window: WindowSums, world: World, kept: KeptWeights = _NONE) -> Content:
    """Return the content of a checkpoint that is saved now. Collective.

    First all ranks copy rank 0's buffers: each rank has its own BatchNorm averages and would write a part of them. So a rank goes on with
    what the checkpoint holds. Under DDP this changes nothing: its next step begins with rank 0's buffers anyway.
    """
    world.copy_from_main(components.trained_module.buffers())
    modules, strategy, optimizer = components.modules, components.strategy, components.optimizer
    states: dict[str, Any] = {name: module.state_dict() for name, module in modules.items()}
    versions: dict[str, Any] = {f"{name}_versions": getattr(module_state, "_metadata", {}) for name, module_state in states.items()}
    is_replica = strategy.weights_are_per_rank and world.size > 1  # then each rank saves its own, and rank 0's are in `shared`
    strategy_state = strategy.state_dict() or None
    large: dict[str, Any] = {
        **states,
        "optimizer": optimizer.state_dict(),
        "optimizer_class": saved_class(optimizer),
        "optimizer_parameters": parameter_names(optimizer, components.trained_module),
        "strategy": None if strategy.state_is_per_rank else strategy_state,
        "parameters_in_training": [*kept.parameters] or None,
    }
    saved_by_all = [name for name, part in large.items() if part is not None and not (is_replica and name.startswith("optimizer"))]
    shared = SharedState(
        **large,
        **versions,
        scheduler=components.scheduler.state_dict(),
        scaler=components.scaler.state_dict(),
        state=state.state_dict(),
        callbacks=callback_states(components, world),
        averages=dict(averages(components)),
        data_identity=components.data_identity,
        written_in_shares=saved_by_all,
        of_rank_0=["optimizer"] if is_replica else [],
    )
    own = RankState(
        random=random_state(world.device),
        window=asdict(window),
        loader=components.train_loader.state_dict(state.position),
        replica=_replica(shared, kept.own_values, world) if is_replica else None,
        strategy=strategy_state if strategy.state_is_per_rank else None,
    )
    buffers = {f"{part}.{name}" for part, module in modules.items() for name, _ in module.named_buffers(remove_duplicate=False)}  # or masks
    return Content(step=state.step, shared=_saved(shared), own=_saved(own), may_be_infinite=lambda name: name in buffers)


def _saved(parts: SharedState | RankState) -> dict[str, Any]:
    return {name: part for name, part in vars(parts).items() if part is not None}


def _replica(shared: SharedState, kept: Mapping[MemoryKey, Tensor], world: World) -> dict[str, Any]:
    """Return the parts of the state that differ on this rank from the shared state, which has rank 0's optimizer."""
    replica: dict[str, Any] = {} if world.is_main else {"optimizer": shared.optimizer}
    for name, part in {"model": shared.model, "objective": shared.objective or {}, "callbacks": shared.callbacks}.items():
        rank_part = map_tensors(lambda tensor: kept.get(memory_key(tensor), tensor), part)
        if any(mine is not common for mine, common in zip(tensors_of(rank_part), tensors_of(part), strict=True)):
            replica[name] = rank_part
    return replica


def start_from(
    checkpoint: Path, components: Components, state: TrainState, world: World, *, on_progress: Callable[[], None] = lambda: None
) -> bool:
    """Put a verified checkpoint into the components and the state, and let the strategy start there. Collective.

    `on_progress` is called while this rank reads. Returns whether this rank has its random streams again: not with another world size.

    Raises CheckpointError: it is not what its format says. UserError: it is of another model or optimizer.
    """
    strategy = components.strategy
    saved_size = size_of(checkpoint, world)
    shared = _from_parts(SharedState, read_shared(checkpoint, world, lay_out=partial(_sharded_like, components), on_progress=on_progress))
    own = _from_parts(RankState, read_own(checkpoint, world.rank)) if saved_size == world.size else None
    replica = own.replica if own and own.replica and strategy.weights_are_per_rank else {}
    if shared.of_rank_0 and (not strategy.weights_are_per_rank or own is None):
        world.print("the checkpoint has weights and an optimizer for each rank: all continue with the mean weights and rank 0's optimizer")
    _load_shared(checkpoint, replace(shared, **replica), components, state, world)
    saved_strategy = shared.strategy if not strategy.state_is_per_rank else own.strategy if own else None
    weights_are_equal = replica.keys().isdisjoint(components.modules)
    strategy.start_training(components.trained_module, saved_strategy or {}, weights_are_equal=weights_are_equal)
    if own is not None:
        state.saved_window = _from_parts(WindowSums, own.window)
        components.train_loader.load_state_dict(own.loader)
        set_random_state(own.random, world.device)
        return True
    if components.scaler.is_enabled():  # the scale times the number of ranks stays (amp.py)
        components.scaler.load_state_dict({**shared.scaler, "scale": shared.scaler["scale"] * saved_size / world.size})
    owns = [_from_parts(RankState, read_own(checkpoint, rank)) for rank in range(saved_size if world.is_main else 1)]
    windows = [_from_parts(WindowSums, own.window) for own in owns]
    state.saved_window = WindowSums.merged(windows, is_main=world.is_main)
    return False


def _from_parts(kind: type[T], parts: Mapping[str, Any]) -> T:
    """Return a dataclass made of the saved parts. Raises CheckpointError: parts are missing, or unknown."""
    known = {field.name: field for field in fields(kind)}
    required = (name for name, field in known.items() if field.default is field.default_factory is MISSING)
    problems = [f"{name} is missing" for name in required if name not in parts]
    problems += [f"{name} is unknown" for name in parts if name not in known]
    if problems:
        raise CheckpointError(happened=f"the parts of {kind.__name__} are not those of this format: {', '.join(problems)}")
    return kind(**parts)


def _load_shared(checkpoint: Path, shared: SharedState, components: Components, state: TrainState, world: World) -> None:
    optimizer, modules = components.optimizer, components.modules
    problems = compare_model(components.model, shared.model)
    objective = compare_model(modules.get("objective", nn.Module()), shared.objective or {})  # it may have no state
    problems += [f"of the objective: {problem}" for problem in objective]
    kind, names = shared.optimizer_class, shared.optimizer_parameters
    problems += compare_optimizer(optimizer, components.trained_module, shared.optimizer, kind=kind, names=names)
    if not problems:
        try:
            put_states(modules, _saved(shared))
            rates = [float(group["lr"]) for group in shared.optimizer["param_groups"]]
            differences = load_optimizer(optimizer, shared.optimizer)
            training_mode(optimizer, shared.parameters_in_training or ())
            components.scheduler.load_state_dict(shared.scheduler)
            components.scaler.load_state_dict(shared.scaler)
            state.load_state_dict(shared.state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problems = [f"{type(error).__name__}: {error}"]
    if problems:
        happened = "\n    ".join([f"{checkpoint} does not fit this model and optimizer:", *problems])
        fix = "resume=never, or the configuration that it was saved with"
        raise UserError(key="resume", happened=happened, expected="a checkpoint of the same configuration", fix=fix)
    differences += _compare_rates(rates, [float(group["lr"]) for group in optimizer.param_groups])
    differences += load_callback_states(components, shared.callbacks)
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
    parameters, names = named_parameters(components.trained_module), plain.get("optimizer_parameters")
    numbered = {str(number): parameters.get(str(name)) for number, name in enumerate(names)} if isinstance(names, list) else {}
    averaged = dict(components.model.named_parameters())
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


def _stateful(callbacks: Mapping[str, Callback]) -> dict[str, SupportsState]:
    """Return the callbacks whose state a checkpoint has, by name."""
    return {name: callback for name, callback in callbacks.items() if isinstance(callback, SupportsState)}


def fresh_states(callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return copies of the states that callbacks have now, by name: call it when they are made."""
    states = {}
    for name, callback in _stateful(callbacks).items():
        with callback_errors(name, "state_dict"):
            states[name] = copy.deepcopy(callback.state_dict())
    return states


def callback_states(components: Components, world: World) -> dict[str, dict[str, Any]]:
    """Return the callbacks' states by name. Collective. Raises RunError: they differ between ranks (of tensors, types and shapes count)."""
    states = {name: callback.state_dict() for name, callback in _stateful(components.callbacks).items()}
    if states:
        by_rank = world.gather({name: json.dumps(encode(state, name)[0], sort_keys=True) for name, state in states.items()})
        for rank, name in product(range(world.size), states):
            if by_rank[rank][name] != by_rank[0][name]:
                happened = f"its state_dict() is not the same on rank {rank} as on rank 0"
                expected = "the same state on every rank: a checkpoint has one"
                fix = "reduce it over the ranks in `on_save`, or leave it out"
                raise RunError(key=f"callbacks.{name}", happened=happened, expected=expected, fix=fix)
    return states


def load_callback_states(components: Components, saved: Mapping[str, Any]) -> list[str]:
    """Load each callback's state; where the checkpoint has none, its `fresh_states` one. Return a line for each that is new or gone."""
    loading = _stateful(components.callbacks)
    states = {**copy.deepcopy(components.fresh_states), **saved}
    for name in loading.keys() & states.keys():
        with callback_errors(name, "load_state_dict"):
            loading[name].load_state_dict(states[name])
    lines = [f"callbacks.{name} has no state in the checkpoint and starts fresh" for name in loading if name not in saved]
    return lines + [f"callbacks.{name} was removed; its state in the checkpoint is dropped" for name in saved if name not in loading]
