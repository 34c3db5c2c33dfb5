"""The turns of a step, and how the strategy wraps them.

A plain step is one turn. Within a step of several, parts of the objective train one after the other, each its own parameters by its own
loss (a GAN). A turn has a `LossModule` of its own around the whole model, which the strategy wraps while the parameters of others are
frozen: so DDP waits for the gradients of this turn alone, and finds all of them. While a turn is taken the others' parameters take no
gradient. All share one optimizer, which leaves alone what has none.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict, join_few
from ddp_train.interfaces import LossModule, Objective, Strategy, TurnObjective
from ddp_train.interfaces.parameters import matching, named_parameters
from ddp_train.traits import name_of


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


def make_turns(trained_module: nn.Module, objective: Objective, strategy: Strategy, world: World) -> list[Turn]:
    """Return the turns of a step; each parameter is in one at least. Collective."""
    if not isinstance(objective, TurnObjective):
        return [Turn(wrapped=strategy.prepare(as_loss_module(trained_module, objective), world.device, world.size))]
    named = named_parameters(trained_module)
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    chosen = {turn: matching(named, patterns, key="objective") & parameters.keys() for turn, patterns in objective.turns.items()}
    if left := [name for name in parameters if not any(name in names for names in chosen.values())]:
        happened = f"{len(left)} parameters are in no turn of {name_of(objective)}: {join_few(left)}"
        raise ConfigError(key="objective", happened=happened, expected="each in one at least, or requires_grad=False")
    if strategy.graph_is_static and sum(map(len, chosen.values())) > len(parameters):
        happened = f"is true, and parameters are in several turns of {name_of(objective)}: the graph changes from turn to turn"
        raise conflict("strategy.static_graph", happened, "false")
    model = trained_module.model if isinstance(trained_module, LossModule) else trained_module
    turns = []
    for name, names in chosen.items():
        others = [parameter for each, parameter in parameters.items() if each not in names]
        with without_gradients_for(others):
            wrapped = strategy.prepare(LossModule(model, objective, turn=name), world.device, world.size)
        turns.append(Turn(name=name, wrapped=wrapped, others=others))
    return turns


def as_loss_module(trained_module: nn.Module, objective: Objective) -> LossModule:
    """Return the `LossModule` of the objective and the trained module, for a strategy to wrap."""
    return trained_module if isinstance(trained_module, LossModule) else LossModule(trained_module, objective, has_state=False)
