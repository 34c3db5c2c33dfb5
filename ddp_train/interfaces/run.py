"""The interfaces of schedulers, metric writers and callbacks, and `Run`, a callback's view of its run."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.errors import UserError
from ddp_train.interfaces.batch import Batch
from ddp_train.interfaces.data import DataSource
from ddp_train.system.phase import Phases
from ddp_train.traits import CallbackConstants, Goal


class Scheduler(Protocol):
    """Sets the learning rates: torch's `LRScheduler`, or ours around one that moves at other times (ddp_train/scheduler)."""

    def step(self) -> None:
        """Called after each optimizer step."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class MetricWriter(Protocol):
    """Writes records to one place. Exists on global rank 0 only.

    An argument that is `auto` in the configuration gets the field of `WriterFacts` with its name.
    """

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl: `split`, `step`, `epoch`, `samples`, `time` and the values."""

    def close(self) -> None:
        """Write the rest. Called at the end of the run and before a rewind, after which a new writer begins."""


@dataclass(frozen=True, kw_only=True)
class WriterFacts:
    """Facts of a run for the arguments of metric writers that are `auto`."""

    run_dir: str
    config: Mapping[str, Any]
    hyper_parameters: Mapping[str, Any]  # typed or swept
    run_name: str = ""  # in a sweep: the values that differ between its jobs
    step: int  # after which this attempt begins
    total_steps: int
    phases: Phases  # of rank 0: `phase` and `step` say where it is at any moment
    epoch: float | None = None  # where this attempt begins; None: there are no epochs, or nothing is trained
    steps_per_epoch: int | None = None
    notes: Callable[[], Sequence[str]] = tuple  # returns lines about the run, for a terminal


@runtime_checkable
class SupportsImages(Protocol):
    """A metric writer that takes pictures, too."""

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        """Take a picture [C, H, W] with C 1 or 3, on the CPU, floats in [0, 1] or uint8."""


@runtime_checkable
class SupportsTexts(Protocol):
    """A metric writer that takes texts, too."""

    def write_text(self, name: str, text: str, step: int) -> None:
        """Take a text, which may be Markdown."""


class Run(Protocol):
    """A callback's view of its run on this rank, with the requests that it may make."""

    total_steps: int
    is_log_step: bool  # in `on_step`: the record is written next
    model: nn.Module  # as the config says, without what the strategy has put around it
    forward_is_collective: bool  # every forward of it is a collective: no rank calls it alone (strategy=fsdp)
    optimizer: Optimizer
    data: DataSource | None  # the training data, as the loader reads it; None: a stream
    goals: Mapping[str, Goal]  # what is measured, the headline metric first, and which way is better; empty without evaluation data
    reports: Sequence[Mapping[str, Any]]  # events of slow ranks and slow data so far, each with a `text`
    metrics: Mapping[str, float]  # the newest value of every metric, as `split/name`
    status: str  # in `on_end`: what result.json will say (completed, preempted, interrupted); before it running
    rank: int
    world_size: int
    device: torch.device
    folder: Path  # the run's; rank 0 alone writes there

    @property
    def step(self) -> int:
        """Steps taken."""

    def log(self, name: str, value: float | Tensor) -> None:
        """Put a number into the next record. A tensor of one element is read later, without waiting for the device.

        The record has the mean over all calls on all ranks since the last one, but for values that are not finite; NaN where none is.
        Not every rank has to call it. In `on_evaluation` the next record is that of the evaluation, else it is the training's; after the
        last one, in `on_save` and `on_end`, there is none.
        """

    def log_image(self, name: str, image: Tensor) -> None:
        """Give rank 0's picture [C, H, W], floats in [0, 1] or uint8, to the metric writers that take one. Waits for the device."""

    def log_text(self, name: str, text: str) -> None:
        """Give rank 0's text to the metric writers that take one."""

    def goodput(self) -> float | None:
        """Return the share of the time since the run's first start that went into steps (docs/time.md); None: not known yet."""

    def stop(self, reason: str) -> None:
        """Let all ranks end the run in good order, as after its last step: evaluated, saved, completed.

        One rank is enough. All agree on it at the end of `on_start` and `on_evaluation`, else at the next log step or evaluation.
        """

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        """Let parameters be trained from the next step on, or keep their values. In `on_start` and `on_step`, by every rank.

        Not by `requires_grad_`, which the strategy would not know of: ranks would drift apart, or wait for each other.

        Args:
            names: as `named_parameters` in parameters.py has them.

        Raises ValueError: one is not the model's, or is to be trained and the optimizer does not have it.
        """

    def evaluation_batch(self) -> Batch | None:
        """Return this rank's first batch of the evaluation data, on the device; None: there is none, or it cannot be read twice."""


class Callback(CallbackConstants):
    """The user's own code at five places of a run. A class has the methods that it needs; it may inherit from this one, and need not.

    Every rank makes the callback and calls all its events, in the order of the configuration, so each may use collectives if every rank
    does; in `on_step` only where `run.is_log_step`, for nothing there is to wait for other ranks. What rank 0 alone should do stands under
    `if run.rank == 0`. An exception ends the run and names the callback.

    One with a state has two more methods (`SupportsState`).
    """

    def on_start(self, run: Run) -> None:
        """The run begins or continues after `run.step`; again after a rewind."""

    def on_step(self, run: Run) -> None:
        """The optimizer has stepped. Called for every step, so nothing here may wait for the device (`.item()`)."""

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """All was evaluated, before the record is written. The model is as it was evaluated: in its mode, without gradients."""

    def on_save(self, run: Run) -> None:
        """A checkpoint is about to be taken; `state_dict` comes next."""

    def on_end(self, run: Run) -> None:
        """Everything is saved, and result.json comes next. Not after a failure."""

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Return tensors by the names that the model has for them, which stand in for its own in every evaluation; None: its own.

        One callback of a run at most has this method.
        """
        return None


@runtime_checkable
class SupportsState(Protocol):
    """A callback with a state in every checkpoint: containers, numbers, text and tensors, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; called for each save, and once when the callback is made: a checkpoint without its state brings that back."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state; called before `on_start`, also after a rewind."""


def implements(callback: Any, name: str) -> bool:
    """Tell whether a callback has a method of its own."""
    method = getattr(type(callback), name, None) or getattr(callback, name, None)
    return callable(method) and method is not getattr(Callback, name, None)


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
