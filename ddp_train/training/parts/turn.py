"""Turns: within one step the parts of an objective train one after the other, each its own parameters by its own loss (a GAN).

A turn has a module of its own around the whole model, which the strategy wraps while the parameters of others are frozen: so DDP waits for
the gradients of this turn alone, and finds all of them. While a turn is taken the others' parameters take no gradient. All share one
optimizer, which leaves alone what has none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, conflict, join_few
from ddp_train.interfaces import AnyObjective, Joint, Strategy, TurnObjective
from ddp_train.interfaces.parameters import matching, named_parameters


@dataclass(kw_only=True)
class Turn:
    """One part of a step."""

    name: str
    module: nn.Module  # computes the turn's loss of a batch, as the strategy has wrapped it
    others: Sequence[nn.Parameter]  # that other turns train

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other turn's parameters take a gradient."""
        frozen = [parameter for parameter in self.others if parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)


def make_turns(trained: nn.Module, objective: AnyObjective, strategy: Strategy, world: World) -> dict[str, Turn]:
    """Return the turns of an objective that takes some, by their names. Each trains something, and each parameter is in one. Collective."""
    if not isinstance(objective, TurnObjective):
        return {}
    named = named_parameters(trained)
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    chosen = {turn: matching(named, patterns, key="objective") & parameters.keys() for turn, patterns in objective.turns.items()}
    if idle := [turn for turn, names in chosen.items() if not names]:
        happened = f"the turn {idle[0]} of {type(objective).__name__} trains nothing: all its parameters are frozen"
        raise ConfigError(key="objective", happened=happened, expected="a turn that trains something; `turns_at` leaves a turn out")
    if left := [name for name in parameters if not any(name in names for names in chosen.values())]:
        happened = f"{len(left)} parameters are in no turn of {type(objective).__name__}: {join_few(left)}"
        raise ConfigError(key="objective", happened=happened, expected="each in one at least, or requires_grad=False")
    if strategy.graph_is_static and sum(map(len, chosen.values())) > len(parameters):
        happened = f"is true, and parameters are in several turns of {type(objective).__name__}: the graph changes from turn to turn"
        raise conflict("strategy.static_graph", happened, "false")
    model = trained.model if isinstance(trained, Joint) else trained
    turns = {}
    for name, names in chosen.items():
        others = [parameter for each, parameter in parameters.items() if each not in names]
        turn = Turn(name=name, module=Joint(model, objective, turn=name), others=others)
        with turn.alone():
            turn.module = strategy.prepare(turn.module, world.device, world.size)
        turns[name] = turn
    return turns
