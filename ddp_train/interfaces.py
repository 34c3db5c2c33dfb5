"""The seams: what a component must offer so that the loop can use it.

Components import what is here and not each other. They take plain keyword arguments and know nothing of Hydra. Of ranks only the
strategy and the loss scaler are told, of the run's folder only metric writers; a callback sees both. What has no protocol here is torch's
own: a model is an `nn.Module`, an optimizer and a scheduler are torch's; a `Dataset` (loader/dataset_adapter.py), an `IterableDataset`
(loader/stream.py) and a loss function (objective/loss.py) are adapted to what is here.

Below the seams are what every side of them needs: a look into batches, the module in which an objective with weights joins its model, and
the names of parameters.

Shapes: B samples, C channels, H height, W width, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.errors import ConfigError

Batch = Any
"""Tensors that share the leading dimension B, nested in tuples, lists or dicts; usually `(inputs, targets)`."""

Indices = NDArray[np.int64]
"""Positions in a data source, shape [B]."""

Goal = Literal["min", "max"]


@runtime_checkable
class DataSource(Protocol):
    """A finite collection of samples that are read by position, a whole batch at a time.

    A `torch.utils.data.Dataset` needs none of this: `ddp_train/loader/dataset_adapter.py` adapts it.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """What only the data knows: `image_shape` (C, H, W), `num_classes`, `classes` (their names), `vocab_size`, `context_length`,
        `bytes_per_token`, `ignore_index` (the target that counts nowhere).

        An argument of the model or the objective that is `auto` in the config takes the fact of the same name.
        """

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, in that order, stacked along a leading dimension B."""


@runtime_checkable
class Augmenting(Protocol):
    """A data source that changes its training samples at random; not while it has `augments` = False, which spares computing the keys."""

    def augment(self, batch: Batch, keys: NDArray[np.uint64]) -> Batch:
        """Return the batch with sample i changed as `keys[i]` says: 64 uniform random bits, shape [B].

        A key depends on (seed, epoch, sample index) alone, so a sample looks the same whatever the number of ranks, workers or restarts.
        (On its position too with `loader.sampling=weighted` or `balanced`, where a sample may come twice in an epoch.)
        """


@runtime_checkable
class Located(Protocol):
    """A data source that knows where its samples come from, for messages about those that cannot be read."""

    def where(self, index: int) -> str:
        """Return the file, or the file and the place in it, of one sample."""


@runtime_checkable
class Resident(Protocol):
    """A data source that can live on the device."""

    def to(self, device: torch.device) -> None:
        """Keep the data on `device`; batches are made there from now on."""


@runtime_checkable
class Labelled(Protocol):
    """A data source that tells the class of each sample, as `loader.sampling=balanced` needs it."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The classes of the N samples, shape [N]; any integers."""


@runtime_checkable
class Measured(Protocol):
    """A data source that tells how long each sample is, as `loader.bucket_batches` needs it."""

    @property
    def lengths(self) -> NDArray[Any]:
        """The lengths of the N samples, shape [N]; in any unit."""


class Sampler(Protocol):
    """Which sample comes at which position of an epoch: a pure function of (seed, epoch, position), asked for any positions at once."""

    seed: int
    length: int
    """Positions in an epoch."""
    repeats: bool
    """Whether a sample can come more than once in an epoch."""
    window: int
    """Consecutive positions that are only had together, from multiples of it on; 1 where each position stands alone."""

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the indices of the samples at `positions`, shape [n] -> [n]."""


@runtime_checkable
class Objective(Protocol):
    """What is minimised, and what is measured.

    One that is an `nn.Module` may have parameters (a temperature, centres) and buffers: they are trained, shared and saved as the model's.
    """

    goals: Mapping[str, Goal]
    """The metrics that `metrics` returns, the headline one first, and which way is better."""

    def weight(self, batch: Batch) -> int | Tensor:
        """How many units (samples, tokens) the batch's loss sums over.

        An int when the shapes alone tell, the same for every sample; else a tensor of shape [], which costs one small all-reduce a step.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the batch's units, shape [], with gradient. One call of `model`, so that DDP sees one forward.

        The sum, not the mean: the loop divides it by the weight of the whole global batch, over all ranks and micro-batches.
        """

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return what evaluation adds up over all samples: floats for sums, int64 for counts; of shape [], or [K] for one per class."""

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Turn the sums over the whole evaluation set into metrics: numbers, and lists of them for what has shape [K]."""


@runtime_checkable
class Predicting(Protocol):
    """An objective that can also say what it scored, sample by sample: for `evaluation.save_predictions=true`."""

    def predict(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what `score` returns, and from the same forward one row per sample: name -> [B, ...], alike in every batch.

        Each name becomes a file NAME.npy with one row for each evaluation sample, in the data set's order.
        """


@runtime_checkable
class Comparing(Protocol):
    """An objective that can also say what its metrics compare: for `evaluation.metrics`."""

    def compare(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Any, Any]]:
        """Return what `score` returns, and from the same forward the rows of `predict` ({} without) and predictions with their targets.

        Predictions are what torchmetrics takes (probabilities, not logits), one row for each sample; targets have a length.
        """


@runtime_checkable
class Inferring(Protocol):
    """An objective that can say what a model finds in samples whose targets nobody knows: for `ddp-train predict`."""

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        """Return one row per sample: name -> [B, ...], alike in every batch.

        Args:
            inputs: the batch without its targets: a tuple or a dict of the model's arguments.
        """


@runtime_checkable
class Borrowing(Protocol):
    """An objective that begins with weights of others: a teacher. It is an `nn.Module`."""

    borrows: Mapping[str, str]
    """Name of a part of the objective -> its weights, as `init_from` takes them."""


@runtime_checkable
class Meeting(Protocol):
    """An objective that has to know the model before the first batch."""

    def meet(self, model: nn.Module) -> None:
        """Look at the model, before anything wraps it."""


@runtime_checkable
class TakingTurns(Protocol):
    """An objective whose parts take turns within a step, each with a loss and parameters of its own: a GAN, actor and critic.

    One optimizer step of each turn makes a step of the run. All turns of a step get the same micro-batches, and `weight` holds for each.
    """

    turns: Mapping[str, Sequence[str]]
    """Name of a turn -> the parameters that it trains, as `matching` takes them, in their order; each parameter is in one at least."""

    def loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        """Return the turn's loss summed over the batch's units, shape [], with gradient. Any part of the model may be called."""


@runtime_checkable
class ChoosingTurns(Protocol):
    """An objective that takes not every turn in every step: five of the critic to one of the generator."""

    def turns_at(self, step: int) -> Sequence[str]:
        """Return the turns of the step that comes after `step` steps, one at least, in their order. The same on every rank."""


@runtime_checkable
class Strategy(Protocol):
    """How the ranks hold the model together."""

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        """Return the module to train, on `device`. Collective.

        Args:
            model: the model; with an objective that has weights of its own both in one module, whose forward takes a batch and returns the
                loss (`Joint`).
        """

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients local (all micro-batches of a step but the last)."""


class Scheduler(Protocol):
    """What sets the learning rates: torch's `LRScheduler`, or ours around one that moves at other times (ddp_train/scheduler)."""

    def step(self) -> None:
        """Say that an optimizer step was taken."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step, one for each parameter group."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class Amp(Protocol):
    """Automatic mixed precision: in which type forward computes, and whether the loss is scaled."""

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context for forward and loss; for every micro-batch anew. Backward and evaluation metrics need none."""

    def scaler(self, device: torch.device, world_size: int = 1) -> torch.amp.GradScaler:
        """Return the loss scaler of a run; a disabled one, whose methods pass through, where losses are not scaled.

        The loop multiplies the loss by the world size besides: the product of both is to be the same for any number of ranks.
        """


@runtime_checkable
class MetricWriter(Protocol):
    """Where numbers go. Exists on global rank 0 only."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl: `split`, `step`, `epoch`, `samples`, `time` and the values."""

    def close(self) -> None:
        """Write what is left: the run is over, or it goes back to a checkpoint, from which a new writer begins."""


@runtime_checkable
class ImageWriter(Protocol):
    """A metric writer that takes images, too."""

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        """Take a picture: [C, H, W] with C 1 or 3, on the CPU; floats in [0, 1], or uint8."""


@runtime_checkable
class TextWriter(Protocol):
    """A metric writer that takes texts, too."""

    def write_text(self, name: str, text: str, step: int) -> None:
        """Take a text; it may be Markdown."""


class Run(Protocol):
    """What a callback sees of its run on this rank, and what it may ask for."""

    step: int  # steps taken
    total_steps: int
    is_log_step: bool  # in `step`: the record is written next
    model: nn.Module  # as the config says, without what the strategy has put around it
    optimizer: Optimizer
    data: Any  # the training data, as the loader reads it
    goals: Mapping[str, Goal]  # what is measured, the headline metric first, and which way is better; empty without evaluation data
    metrics: Mapping[str, float]  # the newest value of every metric, as `split/name`
    status: str  # in `end`: what result.json will say (completed, preempted, interrupted); before it running
    rank: int
    world_size: int
    device: torch.device
    folder: Path  # the run's; rank 0 alone writes there

    def log(self, name: str, value: float | Tensor) -> None:
        """Put a number into the next record, a tensor of one element without waiting for the device.

        The record has the mean over all calls on all ranks since the last one, but for values that are not finite; NaN where none is.
        Not every rank has to call it. In `evaluation` the next record is that of the evaluation, else it is the training's; after the
        last one, in `save` and `end`, there is none.
        """

    def log_image(self, name: str, image: Tensor) -> None:
        """Give rank 0's picture [C, H, W], floats in [0, 1] or uint8, to the metric writers that take one. Waits for the device."""

    def log_text(self, name: str, text: str) -> None:
        """Give rank 0's text to the metric writers that take one."""

    def stop(self, reason: str) -> None:
        """Let all ranks end the run in good order, as after its last step: evaluated, saved, completed.

        One rank is enough. All agree on it at the end of this event in `start` and `evaluation`, else at the next log step or evaluation.
        """

    def set_trained(self, names: Collection[str], is_trained: bool) -> None:
        """Let parameters be trained from the next step on, or keep their values. In `start` and `step`, by every rank.

        Not by `requires_grad_`, which the strategy would not know of: ranks would drift apart, or wait for each other.

        Args:
            names: as `named_parameters` below has them.

        Raises:
            ValueError: one is not the model's, or is to be trained and the optimizer does not have it.
        """

    def evaluation_batch(self) -> Batch | None:
        """Return this rank's first batch of the evaluation data, on the device; None: there is none, or it cannot be read twice."""


class Callback(Protocol):
    """The user's own code at five places of a run. A class has the methods that it needs, and no base class.

    Every rank makes the callback and calls all its events, in the order of the configuration, so each may use collectives if every rank
    does; in `step` only where `run.is_log_step`, for nothing there is to wait for other ranks. What rank 0 alone should do stands under
    `if run.rank == 0`. An exception ends the run and names the callback.

    With `state_dict` and `load_state_dict` a callback has a state in every checkpoint: containers, numbers, text and tensors, the same on
    every rank. It comes back before `start`, and over a rewind. `state_dict` is asked once when the callback is made, too: a run that goes
    back to a checkpoint without its state begins with that.
    """

    def start(self, run: Run) -> None:
        """The run begins or continues after `run.step`; again after a rewind."""

    def step(self, run: Run) -> None:
        """The optimizer has stepped. Called for every step, so nothing here may wait for the device (`.item()`)."""

    def evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """All was evaluated, before the record is written. The model is as it was evaluated: in its mode, without gradients."""

    def save(self, run: Run) -> None:
        """A checkpoint is about to be taken; `state_dict` comes next."""

    def end(self, run: Run) -> None:
        """Everything is saved, and result.json comes next. Not after a failure."""


@runtime_checkable
class Averaging(Protocol):
    """A callback that has other weights for evaluation; one of a run at most."""

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        """Return tensors by the names that the model has for them, which stand in for its own in every evaluation; None: its own."""


_SHOWN = 8  # parts of a nest, names of parameters
_COMPILED = "_orig_mod."  # what torch.compile puts before the names of a module that it wraps


def batch_size(batch: Batch) -> int:
    """Return the number of samples B: the first dimension of the first tensor in the nest. Reads shapes only, never the device.

    Raises:
        TypeError: the batch holds no tensor with a leading dimension.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    raise TypeError(f"a batch is tensors with a leading dimension B in tuples, lists or dicts; found none in a {type(batch).__name__}")


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of the nest, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the same nest with every tensor changed. Mappings become dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(change, value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        changed = [map_tensors(change, value) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)  # a named tuple takes its fields one by one
    return batch


def describe(value: Any) -> str:
    """Return types and shapes for a person: `(float32 [32, 3, 8, 8], int64 [32])`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = "" if type(value) in (dict, tuple, list) else type(value).__name__
    if isinstance(value, Mapping):
        return f"{name}{{{_few([f'{key}: {describe(each)}' for key, each in value.items()])}}}"
    if isinstance(value, (tuple, list)):
        return f"{name}({_few([describe(each) for each in value])})"
    return "None" if value is None else f"a {name}"


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN] + ["..."] * (len(texts) > _SHOWN))


class Joint(nn.Module):
    """Computes the loss of a batch in its forward, so that a strategy sees where each parameter is used.

    Args:
        objective: an `nn.Module`, too, where it has weights.
        turn: whose loss; None: the objective takes no turns.
    """

    def __init__(self, model: nn.Module, objective: Objective, *, turn: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.objective: Any = objective
        self.turn = turn

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss summed over the batch's units, shape []."""
        loss: Tensor = self.objective.loss(self.model, batch, *([] if self.turn is None else [self.turn]))
        return loss

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; that of the objective's parts is its own (a teacher that only evaluates)."""
        self.training = mode
        self.model.train(mode)
        return self


def whole_loss(objective: Any, model: nn.Module, batch: Batch) -> Tensor:
    """Return the training loss of a batch, shape []; of turns their sum."""
    if not isinstance(objective, TakingTurns):
        loss: Tensor = objective.loss(model, batch)
        return loss
    return torch.stack([objective.loss(model, batch, turn) for turn in objective.turns]).sum()


def named_parameters(trained: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of what is trained, tied ones once, by the names that a user knows.

    These are the model's own, without what `Joint` and torch.compile put before them; an objective's begin with `objective.`.
    """
    names = {name: plain_name(name) for name, _ in trained.named_parameters()}
    if isinstance(trained, Joint):
        names = {name: plain.removeprefix("model.") for name, plain in names.items()}
    return {names[name]: parameter for name, parameter in trained.named_parameters()}


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile puts before a module that it has wrapped."""
    return name.replace(_COMPILED, "")


def matching(names: Collection[str], patterns: Sequence[str], *, key: str) -> set[str]:
    """Return the parameters that patterns choose: by their whole name, or by that of a module that they are in.

    `head` and `layers.0` are all in them, `*.bias` every bias (`*` is any text, dots too), `layers.[0-3]` four layers.

    Args:
        key: the config key that has the patterns, for errors.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not found:
            modules = {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}
            close = difflib.get_close_matches(pattern, sorted(modules), n=1)
            raise ConfigError(
                key=key,
                happened=f"{pattern!r} matches no parameter" + (f"; did you mean {close[0]}?" if close else ""),
                expected=f"the name of a parameter or of a module that holds some, with * and ? as in file names: {_few(sorted(names))}",
            )
        chosen |= found
    return chosen
