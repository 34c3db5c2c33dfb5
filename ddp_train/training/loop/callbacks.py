"""The events of a run's callbacks: which callback takes part in which event, its view of the run, and its requests."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, Concatenate

from torch import Tensor

from ddp_train import model_log
from ddp_train.config.schema import EVENTS
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Goal, Run, named_parameters, overrides
from ddp_train.loader.device_copy import to_device
from ddp_train.model_log import Sink
from ddp_train.training.check.rehearsal import rebuild_buckets, untouched
from ddp_train.training.loop.evaluation import as_evaluated
from ddp_train.training.loop.trainer import Hooks, Trainer
from ddp_train.training.parts.components import Components, callback_errors
from ddp_train.training.record.logged import check_logged, mean
from ddp_train.training.train_state import EarlyEnd


class RunView:
    """The run as callbacks see it (`interfaces.Run`); `settings` are the nodes of the callbacks in the configuration."""

    def __init__(self, trainer: Trainer, settings: Mapping[str, Any]) -> None:
        components, world = trainer.components, trainer.world
        self.components, self.state, self.world, self.logged = components, trainer.state, world, trainer.logged
        self.model, self.optimizer = components.model, components.optimizer
        self.goals: Mapping[str, Goal] = components.goals
        self.total_steps, self.forward_is_collective = components.total_steps, components.forward_is_collective
        self.data = components.train_loader.source
        self.rank, self.world_size, self.device = world.rank, world.size, world.device
        self.metrics: Mapping[str, float] = trainer.last
        self.folder, self.show = trainer.services.run_folder.root, trainer.services.show
        self.settings = settings
        self.trainer, self.status, self.is_log_step = trainer, "running", False
        self.event = self.caller = ""  # the event, and the callback that is called now
        self.sink: Sink | None = None  # gets what is logged; None: no record will have it
        self.trains_others = False  # other parameters are trained since the strategy has wrapped the model

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
        self.logged.end_request = self.logged.end_request or EarlyEnd.at(self.caller, reason, self.settings)

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        if self.event not in ("start", "step"):
            raise ValueError(f"set_trained() in `{self.event}`; call it in `start` or `step`")
        parameters = named_parameters(self.components.trained)
        optimized = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if unknown := [name for name in names if name not in parameters]:
            raise ValueError(f"set_trained(): the model has no parameter {unknown[0]!r}")
        if is_trained and (frozen := [name for name in names if parameters[name] not in optimized]):
            raise ValueError(f"set_trained(): the optimizer does not have {frozen[0]!r}: it was frozen when the optimizer was made")
        for name in names:
            self.trains_others |= parameters[name].requires_grad != is_trained
            parameters[name].requires_grad_(is_trained)

    def evaluation_batch(self) -> Batch | None:
        loader = self.components.eval_loader
        micro_batch = loader.peek() if loader is not None else None
        if micro_batch is None:
            return None
        self.components.compiled.begin_batch()
        return to_device(micro_batch.batch, self.device)


class Callbacks:
    """Calls a run's callbacks, each event on all ranks at the same place, in the order of the configuration."""

    def __init__(self, callbacks: Mapping[str, Any], view: RunView) -> None:
        self._view = view
        self._methods: dict[str, list[tuple[str, Callable[Concatenate[Run, ...], object]]]] = {
            event: [(name, getattr(callback, event)) for name, callback in callbacks.items() if overrides(callback, event)]
            for event in EVENTS
        }

    def register(self, hooks: Hooks) -> None:
        """Let the loop call the events that these callbacks have."""
        if self._methods["start"]:
            hooks.at_start.append(self.start)
        if self._methods["step"]:
            hooks.after_step.append(self.step)
        if self._methods["evaluation"]:
            hooks.after_evaluation.append(self.evaluation)
        elif self._methods["step"]:  # it may have requested a stop since the last log step
            hooks.after_evaluation.append(lambda metrics: self._view.logged.agree(self._view.world))
        hooks.before_save.append(lambda step: self._call("save", None))
        hooks.at_end.append(self.end)

    def start(self) -> None:
        """Called when the run begins, and after a rewind. Collective."""
        self._call("start", self._view.logged.add)
        self._view.logged.agree(self._view.world)

    def step(self, step: int) -> None:
        """Called after each step. Collective where a callback makes it so."""
        self._call("step", self._view.logged.add)

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Called with the metrics; add the values that callbacks log, the mean over all finite ones of all ranks. Collective."""
        view, values = self._view, dict[str, list[float]]()

        def add(name: str, value: float | Tensor) -> None:
            check_logged(name, value, reserved=list(metrics))
            values.setdefault(name, []).append(float(value))

        of_main = view.world.from_main(lambda: dict(metrics))  # a differing last bit could make ranks decide differently
        with as_evaluated(view.components):
            self._call("evaluation", add, of_main)
        view.logged.agree(view.world)
        by_rank = view.world.gather(values)
        names = dict.fromkeys(chain.from_iterable(by_rank))
        metrics |= {name: mean(chain.from_iterable(logged.get(name, ()) for logged in by_rank)) for name in names}

    def end(self, status: str) -> None:
        """Called when the run has ended without an error. Collective."""
        self._view.status = status
        self._call("end", None)

    def _call(self, event: str, sink: Sink | None, *arguments: Any) -> None:
        view = self._view
        view.event, view.sink = event, sink
        view.is_log_step = event == "step" and view.trainer.is_log_step(view.step)
        for name, method in self._methods[event]:
            view.caller = name
            with callback_errors(name, event):
                method(view, *arguments)
        if view.trains_others:
            view.trains_others = False
            if not any(parameter.requires_grad for group in view.optimizer.param_groups for parameter in group["params"]):
                happened = f"no parameter is left to train after step {view.step}"
                raise ConfigError(key=f"callbacks.{view.caller}", happened=happened, expected="at least one that is not frozen")
            _wrap_again(view.components, view.world)


def _wrap_again(components: Components, world: World) -> None:
    """Let the run go on as if it resumed from here: the strategy wraps the model again, and DDP has rebuilt its buckets. Collective."""
    components.optimizer.zero_grad(set_to_none=True)
    if world.size == 1 and not components.turns:
        return
    components.rewrap(world)
    with untouched(components, world.device), model_log.taken_by(None):
        rebuild_buckets(components, world)
