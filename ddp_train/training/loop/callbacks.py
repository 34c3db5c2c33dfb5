"""The events of a run's callbacks: who takes part in which, what they see of the run, and what comes of what they ask for."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Collection, Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train import model_log
from ddp_train.checkpoint import codec
from ddp_train.config.schema import EVENTS
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, RunError
from ddp_train.interfaces import Batch, named_parameters, overrides
from ddp_train.loader.device_copy import batch_on
from ddp_train.model_log import Sink
from ddp_train.training.loop.evaluation import as_evaluated, named
from ddp_train.training.loop.trainer import Hooks, Trainer
from ddp_train.training.parts.components import Components, with_loss
from ddp_train.training.parts.turn import make_turns
from ddp_train.training.record.logged import check, mean
from ddp_train.training.train_state import Stopped

Show = Callable[[str, "Tensor | str", int], None]
"""Takes the name of an image or a text, itself, and the step; on rank 0."""


class RunView:
    """The run as callbacks see it (`interfaces.Run`); `show` takes rank 0's images and texts, `settings` are the nodes of the callbacks."""

    def __init__(self, trainer: Trainer, *, folder: Path, show: Show, settings: Mapping[str, Any]) -> None:
        components, world = trainer.components, trainer.world
        self.components, self.state, self.world, self.logged = components, trainer.state, world, trainer.logged
        self.model, self.optimizer, self.goals = components.model, components.optimizer, components.goals
        self.total_steps, self.computes_together = components.total_steps, components.computes_together
        self.data = components.train_loader.source
        self.rank, self.world_size, self.device = world.rank, world.size, world.device
        self.metrics: Mapping[str, float] = trainer.last
        self.folder, self.show, self.settings = folder, show, settings
        self.status, self.is_log_step = "running", False
        self.event = self.caller = ""  # the event, and the callback whose turn it is
        self.sink: Sink | None = None  # where `log` goes; None: no record is to come
        self.is_changed = False  # which parameters are trained, since the strategy has seen them

    @property
    def step(self) -> int:
        return self.state.step

    def log(self, name: str, value: float | Tensor) -> None:
        if self.sink is None:
            raise ValueError(f"log({name!r}, ...) in `{self.event}`: no record is sure to come; log in `start`, `step` or `evaluation`")
        self.sink(name, value)

    def log_image(self, name: str, image: Tensor) -> None:
        if not self.world.is_main:
            return
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise ValueError(f"log_image({name!r}, ...) takes a picture [C, H, W] with C 1 or 3, and got {list(image.shape)}")
        self.show(name, image.detach().cpu(), self.step)

    def log_text(self, name: str, text: str) -> None:
        if self.world.is_main:
            self.show(name, text, self.step)

    def stop(self, reason: str) -> None:
        if self.event == "end":
            raise ValueError("stop() in `end`: the run is over")
        self.logged.asked = self.logged.asked or Stopped.at(self.caller, reason, self.settings)

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        if self.event not in ("start", "step"):
            raise ValueError(f"set_trained() in `{self.event}`; call it in `start` or `step`")
        parameters = named_parameters(self.components.trained)
        optimized = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if unknown := [name for name in names if name not in parameters]:
            raise ValueError(f"set_trained(): the model has no parameter {unknown[0]!r}")
        if is_trained and (left := [name for name in names if parameters[name] not in optimized]):
            raise ValueError(f"set_trained(): the optimizer does not have {left[0]!r}: it was frozen when the optimizer was made")
        for name in names:
            self.is_changed |= parameters[name].requires_grad != is_trained
            parameters[name].requires_grad_(is_trained)

    def evaluation_batch(self) -> Batch | None:
        loader = self.components.eval_loader
        micro_batch = loader.peek() if loader is not None else None
        if micro_batch is None:
            return None
        self.components.compiled.begin_batch()
        return batch_on(self.device, micro_batch)


class Callbacks:
    """Calls a run's callbacks, each event on all ranks at the same place, in the order of the configuration."""

    def __init__(self, callbacks: Mapping[str, Any], view: RunView) -> None:
        self._view = view
        self._at = {event: [(name, getattr(each, event)) for name, each in callbacks.items() if overrides(each, event)] for event in EVENTS}

    def hang_on(self, hooks: Hooks, is_log_step: Callable[[int], bool]) -> None:
        """Let the loop call the events that these callbacks have."""
        self._is_log_step = is_log_step
        if self._at["start"]:
            hooks.at_start.append(self.start)
        if self._at["step"]:
            hooks.after_step.append(self.step)
        if self._at["evaluation"]:
            hooks.after_evaluation.append(self.evaluation)
        elif self._at["step"]:  # which may have asked for a stop since the last log step
            hooks.after_evaluation.append(lambda metrics: self._view.logged.agree(self._view.world))
        hooks.before_save.append(lambda step: self._call("save", None))
        hooks.at_end.append(self.end)

    def start(self) -> None:
        """Called when the run begins, and when it goes on after a rewind. Collective."""
        self._call("start", self._view.logged.add)
        self._view.logged.agree(self._view.world)

    def step(self, step: int) -> None:
        """Called after each step. Collective where a callback makes it so."""
        self._view.is_log_step = self._is_log_step(step)
        self._call("step", self._view.logged.add)
        self._view.is_log_step = False

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Called with what was measured; add to it what was logged, the mean over all finite values of all ranks. Collective."""
        view, values = self._view, dict[str, list[float]]()

        def add(name: str, value: float | Tensor) -> None:
            check(name, value, taken=list(metrics))
            values.setdefault(name, []).append(float(value))

        with as_evaluated(view.components):
            self._call("evaluation", add, view.world.from_main(dict(metrics)))  # else a last bit could part the ranks' decisions
        view.logged.agree(view.world)
        every = view.world.gather(values)
        names = dict.fromkeys(chain.from_iterable(every))
        metrics |= {name: mean(chain.from_iterable(found.get(name, ()) for found in every)) for name in names}

    def end(self, status: str) -> None:
        """Called when the run has ended in good order. Collective."""
        self._view.status = status
        self._call("end", None)

    def _call(self, event: str, sink: Sink | None, *arguments: Any) -> None:
        view = self._view
        view.event, view.sink = event, sink
        for name, method in self._at[event]:
            view.caller = name
            try:
                method(view, *arguments)
            except Exception as error:
                raise named(error, name, event)  # noqa: B904  # the same error
        if view.is_changed:
            view.is_changed = False
            if not any(parameter.requires_grad for group in view.optimizer.param_groups for parameter in group["params"]):
                happened = f"no parameter is left to train after step {view.step}"
                raise ConfigError(key=f"callbacks.{view.caller}", happened=happened, expected="at least one that is not frozen")
            _wrap_again(view.components, view.world)


def states(callbacks: Mapping[str, Any], world: World) -> dict[str, dict[str, Any]]:
    """Return the states of those that have one, by name, alike on all ranks (of tensors, types and shapes), or a RunError. Collective."""
    found = {name: each.state_dict() for name, each in callbacks.items() if hasattr(each, "state_dict")}
    if found:
        mine = {name: json.dumps(codec.encode(state, name)[0], sort_keys=True) for name, state in found.items()}
        every = world.gather(mine)
        for rank, name in product(range(world.size), mine):
            if every[rank][name] != every[0][name]:
                happened = f"its state_dict() is not the same on rank {rank} as on rank 0"
                expected = "the same state on every rank: a checkpoint has one"
                fix = "reduce it over the ranks in `save`, or leave it out"
                raise RunError(key=f"callbacks.{name}", happened=happened, expected=expected, fix=fix)
    return found


def fresh_states(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the states that callbacks are made with, by name: of those that have one and can load it."""
    found = {}
    for name, each in callbacks.items():
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            try:
                found[name] = copy.deepcopy(each.state_dict())
            except Exception as error:
                raise named(error, name, "state_dict")  # noqa: B904  # the same error
    return found


def load_states(callbacks: Mapping[str, Any], saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Give each callback its state back; where the checkpoint has none, its `fresh` one. Return a line for each that is new or gone."""
    own = {name: each for name, each in callbacks.items() if hasattr(each, "load_state_dict")}
    given = copy.deepcopy({**fresh}) | {**saved}
    for name in own.keys() & given.keys():
        try:
            own[name].load_state_dict(given[name])
        except Exception as error:
            raise named(error, name, "load_state_dict")  # noqa: B904  # the same error
    lines = [f"callbacks.{name} has no state in the checkpoint, and begins now" for name in own if name not in saved]
    return lines + [f"callbacks.{name} is gone, and its state in the checkpoint with it" for name in saved if name not in own]


def _wrap_again(components: Components, world: World) -> None:
    """Let the strategy see anew which parameters are trained. Collective.

    The run is then where one would be that resumes from here: DDP has rebuilt its buckets (`rebuild_buckets`), and nothing else is changed.
    """
    components.optimizer.zero_grad(set_to_none=True)
    if world.size == 1 and not components.turns:
        return
    has_turns, components.module, components.turns = bool(components.turns), components.trained, {}
    gc.collect()  # the module before is in a cycle, and keeps its hooks on the parameters as long as it lives
    if has_turns:
        components.turns = make_turns(components.trained, components.objective, components.strategy, world)
    else:
        components.module = components.strategy.prepare(with_loss(components.trained, components.objective), world.device, world.size)
    with components.untouched(world.device), model_log.taken_by(None):
        components.rebuild_buckets(world)
