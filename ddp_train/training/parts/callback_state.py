"""The states of a run's callbacks, which a checkpoint has, and errors of callbacks, which get their name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

from ddp_train.checkpoint import codec
from ddp_train.distributed.world import World
from ddp_train.errors import RunError, UserError
from ddp_train.interfaces import SupportsState


def states(callbacks: Mapping[str, Any], world: World) -> dict[str, dict[str, Any]]:
    """Return the callbacks' states by name. Collective. Raises RunError: they differ between ranks (of tensors, types and shapes count)."""
    states = {name: callback.state_dict() for name, callback in callbacks.items() if isinstance(callback, SupportsState)}
    if states:
        by_rank = world.gather({name: json.dumps(codec.encode(state, name)[0], sort_keys=True) for name, state in states.items()})
        for rank, name in product(range(world.size), states):
            if by_rank[rank][name] != by_rank[0][name]:
                happened = f"its state_dict() is not the same on rank {rank} as on rank 0"
                expected = "the same state on every rank: a checkpoint has one"
                fix = "reduce it over the ranks in `save`, or leave it out"
                raise RunError(key=f"callbacks.{name}", happened=happened, expected=expected, fix=fix)
    return states


def fresh_states(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the initial states of callbacks, by name: of those that have one."""
    states = {}
    for name, callback in callbacks.items():
        if isinstance(callback, SupportsState):
            with callback_errors(name, "state_dict"):
                states[name] = copy.deepcopy(callback.state_dict())
    return states


def load_states(callbacks: Mapping[str, Any], saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Load each callback's state; where the checkpoint has none, its `fresh` one. Return a line for each that is new or gone."""
    loading = {name: callback for name, callback in callbacks.items() if isinstance(callback, SupportsState)}
    states = copy.deepcopy({**fresh}) | {**saved}
    for name in loading.keys() & states.keys():
        with callback_errors(name, "load_state_dict"):
            loading[name].load_state_dict(states[name])
    lines = [f"callbacks.{name} has no state in the checkpoint, and begins now" for name in loading if name not in saved]
    return lines + [f"callbacks.{name} is gone, and its state in the checkpoint with it" for name in saved if name not in loading]


@contextmanager
def callback_errors(name: str, method: str) -> Iterator[None]:
    """Add the name of the callback and of its method to an error of the block."""
    try:
        yield
    except UserError as error:
        error.key = error.key or f"callbacks.{name}"
        raise
    except Exception as error:
        error.add_note(f"config key: callbacks.{name} (in its `{method}`)")
        raise
