"""The events of a run's callbacks: which callback takes part in which event, its view of the run, and its requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Concatenate

from torch import Tensor

from ddp_train import model_log
from ddp_train.config.schema import EVENTS
from ddp_train.distributed.world import World
from ddp_train.interfaces import Batch, Goal, Run
from ddp_train.interfaces.parameters import named_parameters
from ddp_train.interfaces.run import callback_errors, implements
from ddp_train.loader.device_copy import to_device
from ddp_train.model_log import Sink
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.times import read_goodput
from ddp_train.training.check.rehearsal import rebuild_buckets, restoring_state
from ddp_train.training.loop.evaluation import evaluating
from ddp_train.training.loop.hooks import Hooks, RunServices
from ddp_train.training.parts.components import Components
from ddp_train.training.record.logged import Logged, mean, require_loggable
from ddp_train.training.train_state import EarlyEnd, TrainState


class Callbacks:
    """Calls a run's callbacks, each event on all ranks at the same place, in the order of the configuration."""

    def __init__(
        self,
        components: Components,
        state: TrainState,
        world: World,
        services: RunServices,
        *,
        logged: Logged,
        is_log_step: Callable[[int], bool],
        settings: Mapping[str, Any],
    ) -> None:
        """Take the callbacks of the components; `settings` are their configs."""
        self._components, self._state, self._world = components, state, world
        self._logged, self._is_log_step, self._settings = logged, is_log_step, settings
        self._view = RunView(components, state, world, services, self)
        self._event = ""  # the event that is called now
        self._sink: Sink | None = None  # gets what is logged in it; None: no record will have it
        self._caller = ""  # the callback that is called now
        self._trains_others = False  # other parameters are trained since the strategy has wrapped the model
        self._methods: dict[str, list[tuple[str, Callable[Concatenate[Run, ...], object]]]] = {
            event: [(name, getattr(callback, event)) for name, callback in components.callbacks.items() if implements(callback, event)]
            for event in EVENTS
        }

    def hooks(self) -> Hooks:
        """Return the events that these callbacks have, for the loop to call."""
        hooks = Hooks(before_save=[lambda step: self._call("on_save", None)], at_end=[self.end])
        if self._methods["on_start"]:
            hooks.when_steps_begin = [self.start]
        if self._methods["on_step"]:
            hooks.after_step = [self.step]
        if self._methods["on_evaluation"]:
            hooks.after_evaluation = [self.evaluation]
        elif self._methods["on_step"]:  # it may have requested a stop since the last log step
            hooks.after_evaluation = [lambda metrics: self._logged.agree(self._world)]
        return hooks

    def start(self) -> None:
        """Called when the run begins, and after a rewind. Collective."""
        self._call("on_start", self._logged.add)
        self._logged.agree(self._world)

    def step(self, step: int) -> None:
        """Called after each step. Collective where a callback makes it so."""
        self._call("on_step", self._logged.add)

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Called with the metrics; add the values that callbacks log, the mean over all finite ones of all ranks. Collective."""
        values: dict[str, list[float]] = {}

        def add(name: str, value: float | Tensor) -> None:
            require_loggable(name, value, reserved=list(metrics))
            values.setdefault(name, []).append(float(value))

        of_main = self._world.from_main(lambda: dict(metrics))  # a differing last bit could make ranks decide differently
        with evaluating(self._components):
            self._call("on_evaluation", add, of_main)
        self._logged.agree(self._world)
        by_rank = self._world.gather(values)
        names = dict.fromkeys(chain.from_iterable(by_rank))
        metrics |= {name: mean(chain.from_iterable(logged.get(name, ()) for logged in by_rank)) for name in names}

    def end(self, status: Status) -> None:
        """Called when the run has ended without an error. Collective."""
        self._view.status = status
        self._call("on_end", None)

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a value of the callback that is called now, where a record is sure to come."""
        if self._sink is None:
            raise ValueError(
                f"log({name!r}, ...) in `{self._event}`: no record is sure to come; log in `on_start`, `on_step` or `on_evaluation`"
            )
        self._sink(name, value)

    def request_end(self, reason: str) -> None:
        """Note that the callback that is called now wants the run to end; the first request of this rank counts."""
        if self._event == "on_end":
            raise ValueError("stop() in `on_end`: the run is over")
        self._logged.end_request = self._logged.end_request or EarlyEnd.at(self._caller, reason, self._settings)

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        """Let parameters be trained or not (`interfaces.Run`); the model is wrapped again after the event."""
        if self._event not in ("on_start", "on_step"):
            raise ValueError(f"set_trained() in `{self._event}`; call it in `on_start` or `on_step`")
        parameters = named_parameters(self._components.trained_module)
        if unknown := [name for name in names if name not in parameters]:
            raise ValueError(f"set_trained(): the model has no parameter {unknown[0]!r}")
        optimized = {parameter for group in self._components.optimizer.param_groups for parameter in group["params"]}
        if is_trained and (frozen := [name for name in names if parameters[name] not in optimized]):
            raise ValueError(f"set_trained(): the optimizer does not have {frozen[0]!r}: it was frozen when the optimizer was made")
        for name in names:
            self._trains_others |= parameters[name].requires_grad != is_trained
            parameters[name].requires_grad_(is_trained)

    def _call(self, event: str, sink: Sink | None, *arguments: Any) -> None:
        self._event, self._sink = event, sink
        self._view.is_log_step = event == "on_step" and self._is_log_step(self._state.step)
        for name, method in self._methods[event]:
            self._caller = name
            with callback_errors(name, event):
                method(self._view, *arguments)
        if self._trains_others:
            self._trains_others = False
            _wrap_again(self._components, self._world)


class RunView:
    """The run as callbacks see it (`interfaces.Run`)."""

    def __init__(self, components: Components, state: TrainState, world: World, services: RunServices, callbacks: Callbacks) -> None:
        self._components, self._state, self._services = components, state, services
        self.log, self.stop, self.set_trained = callbacks.log, callbacks.request_end, callbacks.set_trained
        self.model, self.optimizer = components.model, components.optimizer
        self.goals: Mapping[str, Goal] = components.goals
        self.total_steps, self.forward_is_collective = components.total_steps, components.forward_is_collective
        self.data = components.train_loader.source
        self.rank, self.world_size, self.device = world.rank, world.size, world.device
        self.metrics: Mapping[str, float] = services.records.last_values
        self.reports: Sequence[Mapping[str, Any]] = services.records.reports
        self.folder = services.run_folder.root
        self.status = "running"
        self.is_log_step = False

    @property
    def step(self) -> int:
        return self._state.step

    def log_image(self, name: str, image: Tensor) -> None:
        if self.rank != 0:
            return
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise ValueError(f"log_image({name!r}, ...) takes a picture [C, H, W] with C 1 or 3, and got {list(image.shape)}")
        self._services.records.show(name, image.detach().cpu(), self.step)

    def log_text(self, name: str, text: str) -> None:
        if self.rank == 0:
            self._services.records.show(name, text, self.step)

    def goodput(self) -> float | None:
        goodput = read_goodput(self._services.run_folder)
        return None if goodput is None else goodput["share"]

    def evaluation_batch(self) -> Batch | None:
        components = self._components
        micro_batch = components.eval_loader.peek() if components.eval_loader is not None else None
        if micro_batch is None:
            return None
        if components.compiled is not None:
            components.compiled.begin_batch()
        return to_device(micro_batch.batch, self.device)


def _wrap_again(components: Components, world: World) -> None:
    """Let the run go on as if it resumed from here: the strategy wraps the model again, and DDP has rebuilt its buckets. Collective."""
    components.optimizer.zero_grad(set_to_none=True)
    if world.size == 1 and not components.turns.by_name:
        return
    components.turns.rewrap()
    with restoring_state(components, world.device), model_log.taken_by(None):
        rebuild_buckets(components, world)
