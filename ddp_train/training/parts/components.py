"""The components of a run on one rank; and turns.

A plain step is one turn. Within a step of several, parts of the objective train one after the other, each its own parameters by its own
loss (a GAN). A turn has a `LossModule` of its own around the whole model, which the strategy wraps while the parameters of others are
frozen: so DDP waits for the gradients of this turn alone, and finds all of them. While a turn is taken the others' parameters take no
gradient. All share one optimizer, which leaves alone what has none.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.amp import Amp
from ddp_train.checkpoint import codec
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, RunError, UserError, conflict, join_few
from ddp_train.interfaces import (
    AnyObjective,
    Batch,
    Callback,
    Goal,
    LossModule,
    Scheduler,
    Scored,
    Strategy,
    SupportsCompare,
    SupportsPredict,
    SupportsState,
    SupportsTurnsAt,
    TurnObjective,
)
from ddp_train.interfaces.parameters import matching, named_parameters
from ddp_train.interfaces.run import implements
from ddp_train.loader.loader import EvaluationLoader, TrainLoader
from ddp_train.loader.reader import LengthPlan
from ddp_train.training.parts.metric import Metric, goals_of
from ddp_train.training.record.throughput import Throughput

if TYPE_CHECKING:
    from ddp_train.training.parts.compiled import Compiled


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One part of a step, or all of it."""

    name: str | None = None  # None: of an objective that takes no turns
    wrapped: nn.Module  # computes the turn's loss of a batch, as the strategy has wrapped it
    others: Sequence[nn.Parameter] = ()  # that other turns train


@contextmanager
def without_gradients_for(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let none of the parameters take a gradient."""
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


class Turns:
    """The turns of a step, as the strategy has wrapped them. `make` returns them, anew at each call. Collective."""

    def __init__(self, make: Callable[[], list[Turn]]) -> None:
        self._make = make
        self.all = make()

    @property
    def plain(self) -> Turn:
        """The only one, of an objective that takes no turns."""
        return self.all[0]

    @property
    def by_name(self) -> dict[str, Turn]:
        """Those of an objective whose parts take turns; {} for any other."""
        return {turn.name: turn for turn in self.all if turn.name is not None}

    def rewrap(self) -> None:
        """Let the strategy wrap the model again, because other parameters are trained now. Collective."""
        self.all = []
        gc.collect()  # the old one is in a reference cycle, and its hooks stay on the parameters as long as it lives
        self.all = self._make()


def make_turns(trained_module: nn.Module, objective: AnyObjective, strategy: Strategy, world: World) -> list[Turn]:
    """Return the turns of a step: each trains something, and each parameter is in one. Collective."""
    if not isinstance(objective, TurnObjective):
        return [Turn(wrapped=strategy.prepare(as_loss_module(trained_module, objective), world.device, world.size))]
    named = named_parameters(trained_module)
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    chosen = {turn: matching(named, patterns, key="objective") & parameters.keys() for turn, patterns in objective.turns.items()}
    if "" in chosen:
        happened = f"{type(objective).__name__} has a turn without a name: {list(chosen)}"
        raise ConfigError(key="objective", happened=happened, expected="a name for each of its turns")
    if idle := [turn for turn, names in chosen.items() if not names]:
        happened = f"the turn {idle[0]} of {type(objective).__name__} trains nothing: all its parameters are frozen"
        raise ConfigError(key="objective", happened=happened, expected="a turn that trains something; `turns_at` leaves a turn out")
    if left := [name for name in parameters if not any(name in names for names in chosen.values())]:
        happened = f"{len(left)} parameters are in no turn of {type(objective).__name__}: {join_few(left)}"
        raise ConfigError(key="objective", happened=happened, expected="each in one at least, or requires_grad=False")
    if strategy.graph_is_static and sum(map(len, chosen.values())) > len(parameters):
        happened = f"is true, and parameters are in several turns of {type(objective).__name__}: the graph changes from turn to turn"
        raise conflict("strategy.static_graph", happened, "false")
    model = trained_module.model if isinstance(trained_module, LossModule) else trained_module
    turns = []
    for name, names in chosen.items():
        others = [parameter for each, parameter in parameters.items() if each not in names]
        with without_gradients_for(others):
            wrapped = strategy.prepare(LossModule(model, objective, turn=name), world.device, world.size)
        turns.append(Turn(name=name, wrapped=wrapped, others=others))
    return turns


@dataclass(frozen=True, kw_only=True)
class EvaluationComponents:
    """The components of an evaluation, also where nothing is trained."""

    model: nn.Module  # as the config says
    trained_module: nn.Module  # what is optimised, saved and compared: the model, or a `LossModule` where the objective has a state, too
    objective: AnyObjective
    amp: Amp
    eval_loaders: Mapping[str, EvaluationLoader]  # by the sets' names, "" (no name) first; {}: nothing is evaluated
    callbacks: Mapping[str, Callback] = field(default_factory=dict)  # by name
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside the objective's own (`evaluation.metrics`)
    forward_is_collective: bool = False  # every forward is a collective
    compiled: Compiled | None = None  # of the model; None: nothing is

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that have weights: the model, and an objective of that kind."""
        return dict(self.trained_module.named_children()) if isinstance(self.trained_module, LossModule) else {"model": self.model}

    def reshard(self) -> None:
        """Free the weights that a forward without a backward has gathered."""

    @property
    def averaging(self) -> str | None:
        """The name of the callback that has other weights for evaluation; None: none has."""
        return next((name for name, callback in self.callbacks.items() if implements(callback, "evaluation_weights")), None)

    @property
    def goals(self) -> dict[str, Goal]:
        """The goal of each metric, the headline one first (`goals_of`)."""
        return goals_of(self.objective, self.metrics, self.eval_loaders)

    @property
    def eval_loader(self) -> EvaluationLoader | None:
        """The loader of the evaluation set without a name, or of the first set where there is none; None: nothing is evaluated."""
        return next(iter(self.eval_loaders.values()), None)

    def evaluate_batch(self, batch: Batch, *, with_predictions: bool) -> Scored:
        """Score a batch in one forward: with predictions and targets for metrics, else with rows to save if `with_predictions`."""
        if self.compiled is not None:
            self.compiled.begin_batch()
        if self.metrics:
            return Scored(*cast(SupportsCompare, self.objective).compare(self.model, batch))  # a tuple of a user's class
        if with_predictions:
            return Scored(*cast(SupportsPredict, self.objective).predict(self.model, batch))
        return Scored(self.objective.score(self.model, batch))


def as_loss_module(trained_module: nn.Module, objective: AnyObjective) -> LossModule:
    """Return the `LossModule` of the objective and the trained module, for a strategy to wrap."""
    return trained_module if isinstance(trained_module, LossModule) else LossModule(trained_module, objective, has_state=False)


@dataclass(frozen=True, kw_only=True)
class Components(EvaluationComponents):
    """All components of a training run."""

    turns: Turns
    strategy: Strategy

    optimizer: Optimizer
    optimizer_shards: Mapping[Tensor, Tensor] = field(default_factory=dict)  # parameter -> its shard here, which the optimizer steps
    scheduler: Scheduler
    scaler: torch.amp.GradScaler
    steps_in_backward: bool  # the optimizer steps in backward, and not after it (`loop/other_steps.py`)

    train_loader: TrainLoader
    length_plan: LengthPlan | None  # of windows of tokens, by the step; None: they are not cut
    data_identity: Mapping[str, Mapping[str, Any]]  # what the data is; a resume compares it (`state/data_identity.py`)

    total_steps: int
    throughput: Throughput
    fresh_states: Mapping[str, Any]  # of the callbacks that have a state: as they were made
    answers: Mapping[str, Any]  # what the arguments that are `auto` came to, by their keys
    notes: Sequence[str]  # on what was done to the model, for the start of a run

    def reshard(self) -> None:
        self.strategy.reshard(self.trained_module)

    def loss(self, batch: Batch, turn: Turn) -> Tensor:
        """Return a turn's loss of a batch, shape [], through the strategy's wrapper."""
        if self.compiled is not None:
            self.compiled.begin_batch()
        loss: Tensor = turn.wrapped(batch)
        return loss

    def turns_at(self, step: int) -> list[Turn]:
        """Return the turns of the step that comes after `step` steps, one at least of those that the objective has."""
        if not isinstance(self.objective, SupportsTurnsAt):
            return self.turns.all
        names, by_name = self.objective.turns_at(step), self.turns.by_name
        if not names or any(name not in by_name for name in names):
            happened = f"{type(self.objective).__name__}.turns_at({step}) gives {list(names)}"
            raise ConfigError(key="objective", happened=happened, expected=f"one at least of {', '.join(by_name)}")
        return [by_name[name] for name in names]

    def zero_gradients(self) -> None:
        if self.zeroes_gradients_in_place():
            self.optimizer.zero_grad(set_to_none=False)
        elif getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:  # it may have more to forget
            self.optimizer.zero_grad(set_to_none=True)
        else:  # what torch's own does, without its note for a profiler, which takes ten times as long
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def zeroes_gradients_in_place(self) -> bool:
        """Tell whether gradients are zeroed in place, in DDP's buckets.

        So with accumulation, where the strategy is for it. Without, DDP itself moves each one there, and zeroing is work for nothing.
        """
        if self.train_loader.grad_accum_steps == 1 or self.turns.by_name:  # each turn of several has buckets of its own
            return False
        return self.strategy.zeroes_gradients_in_place(self.turns.plain.wrapped)


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
        by_rank = world.gather({name: json.dumps(codec.encode(state, name)[0], sort_keys=True) for name, state in states.items()})
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


@contextmanager
def callback_errors(name: str, method: str) -> Iterator[None]:
    """Add the config key of the callback, and its method, to an error of the block."""
    try:
        yield
    except UserError as error:
        error.put_under(f"callbacks.{name}")
        raise
    except Exception as error:
        error.add_note(f"config key: callbacks.{name} (in its `{method}`)")
        raise
