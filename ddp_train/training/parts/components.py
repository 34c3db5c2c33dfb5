"""The components of a run on one rank: all that an evaluation works with, and all that training does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.amp import Amp
from ddp_train.errors import ConfigError
from ddp_train.interfaces import (
    Batch,
    Callback,
    Evaluated,
    Goal,
    LossModule,
    LossSum,
    Objective,
    Scheduler,
    Strategy,
    TurnObjective,
)
from ddp_train.interfaces.objective import evaluate_batch
from ddp_train.interfaces.run import implements
from ddp_train.loader.loader import EvaluationLoader, TrainLoader
from ddp_train.loader.reader import LengthPlan
from ddp_train.training.parts.metric import Metric, goals_of
from ddp_train.training.parts.turns import Turn, Turns
from ddp_train.training.record.throughput import Throughput

if TYPE_CHECKING:
    from ddp_train.training.parts.compiled import Compiled


@dataclass(frozen=True, kw_only=True)
class EvaluationComponents:
    """The components of an evaluation, also where nothing is trained."""

    model: nn.Module  # as the config says
    trained_module: nn.Module  # what is optimised, saved and compared: the model, or a `LossModule` where the objective has a state, too
    objective: Objective
    seed: int = 0  # of the run
    amp: Amp
    eval_loaders: Mapping[str, EvaluationLoader]  # by the sets' names, "" (no name) first; {}: nothing is evaluated
    callbacks: Mapping[str, Callback] = field(default_factory=dict)  # by name
    evaluation_metrics: Mapping[str, Metric] = field(default_factory=dict)  # in addition to the objective's own, by name
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
        return goals_of(self.objective, self.evaluation_metrics, self.eval_loaders)

    @property
    def eval_loader(self) -> EvaluationLoader | None:
        """The loader of the evaluation set without a name, or of the first set where there is none; None: nothing is evaluated."""
        return next(iter(self.eval_loaders.values()), None)

    def evaluate_batch(self, batch: Batch) -> Evaluated:
        """Measure a batch in one forward."""
        if self.compiled is not None:
            self.compiled.begin_batch()
        return evaluate_batch(self.objective, self.model, batch)


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

    def loss(self, batch: Batch, turn: Turn) -> LossSum:
        """Return a turn's loss of a batch, through the strategy's wrapper."""
        if self.compiled is not None:
            self.compiled.begin_batch()
        loss: LossSum = turn.wrapped(batch)
        return loss

    def turns_at(self, step: int) -> list[Turn]:
        """Return the turns of the step that comes after `step` steps, one at least of those that the objective has."""
        if not isinstance(self.objective, TurnObjective):
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
