"""What a component must offer so that the loop can use it: data and its order, objective, strategy, scheduler, mixed precision.

They take plain keyword arguments and know nothing of Hydra. Of ranks only the strategy and the loss scaler are told. What has no protocol
here is torch's own: a model is an `nn.Module`, an optimizer and a scheduler are torch's; a `Dataset` (loader/dataset_adapter.py), an
`IterableDataset` (loader/stream.py) and a loss function (objective/loss.py) are adapted to what is here.

Shapes: B samples, C channels, H height, W width, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_train.interfaces.batch import Batch

Indices = NDArray[np.int64]
"""Positions in a data source, shape [B]."""


Goal = Literal["min", "max"]
Made = TypeVar("Made")


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
class Recognisable(Protocol):
    """Data that says by what it is known again when a run goes on; of other data the length alone is compared."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Sizes, names, hashes of the first and last samples: plain values, had without reading all. Never times: a copy has others."""


@runtime_checkable
class Meaningful(Protocol):
    """Data that says what its numbers mean; of other data that has `classes`, or one label in its `features`, their names count."""

    @property
    def meaning(self) -> Mapping[str, Any]:
        """Vocabulary, classes, tokenizer, mean and std: plain values by name."""


@runtime_checkable
class Adopting(Protocol):
    """Data whose samples can be given the numbers that a run's data had."""

    def adopt(self, meaning: Mapping[str, Any]) -> None:
        """Use the meaning of a run's data from now on, or raise a DataError."""


@runtime_checkable
class Resident(Protocol):
    """A data source that can live on the device."""

    def to(self, device: torch.device) -> None:
        """Keep the data on `device`; batches are made there from now on."""


@runtime_checkable
class GivingPixels(Protocol):
    """A data source whose images can travel as bytes."""

    def give_pixels(self) -> None:
        """Let batches be `Pixels` from now on, which are normalised on the device."""


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
        """Return the loss summed over the batch's units, shape [], with gradient.

        `model` is the user's own on any number of ranks: it may be called several times, and so may methods of it.

        The sum, not the mean: the loop divides it by the weight of the whole global batch, over all ranks and micro-batches.
        """

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return what evaluation adds up over all samples: floats for sums, int64 for counts; of shape [], or [K] for one per class."""

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Turn the sums over the whole evaluation set into metrics: numbers, and lists of them for what has shape [K]."""


@runtime_checkable
class Counting(Protocol):
    """An objective that says what its `weight` counts: of tokens the record has the rate."""

    unit: str
    """"token", "next_token" (tokens that another one comes before), "sample", or another word."""


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

    def bind_model(self, model: nn.Module) -> None:
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


def adapted(base: type[Made], made: Any, *, required: Sequence[str]) -> Made:
    """Return what a component of another class made as one of a base class of ours: what it lacks is what the base has. Called by build.

    Raises:
        TypeError: it lacks what has no default.
    """
    known = {name: inspect.getattr_static(base, name) for name in dir(base) if name == "__len__" or not name.startswith("_")}
    own = [name for name, default in known.items() if inspect.getattr_static(made, name, default) is not default]
    if missing := [name for name in required if name not in own]:
        raise TypeError(f"{type(made).__name__} lacks {', '.join(missing)} (ddp_train.interfaces.{base.__name__})")
    if isinstance(made, base):
        return made

    def forwarded(name: str) -> property:
        return property(lambda self: getattr(made, name), lambda self, value: setattr(made, name, value))

    members: dict[str, Any] = {name: forwarded(name) for name in own}
    members |= {"__getattr__": lambda self, name: getattr(made, name), "__reduce__": lambda self: (_again, (base, made, required))}
    kind: type[Made] = type(type(made).__name__, (base,), members)
    return kind()


def _again(base: type[Made], made: Any, required: Sequence[str]) -> Made:
    """Adapt a component anew in another process."""
    return adapted(base, made, required=required)
