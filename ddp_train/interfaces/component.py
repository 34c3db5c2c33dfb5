"""What a component must offer so that the loop can use it: data and its order, objective, strategy, scheduler, mixed precision.

They take plain keyword arguments and know nothing of Hydra. Of ranks only the strategy and the loss scaler are told. What has no protocol
here is torch's own: a model is an `nn.Module`, an optimizer and a scheduler are torch's; a `Dataset` (loader/dataset_adapter.py), an
`IterableDataset` (loader/stream.py) and a loss function (objective/loss.py) are adapted to what is here.

Shapes: B samples, C channels, H height, W width, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces.batch import Batch

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


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Among how many ranks each part of a run is cut; 1: every rank has all of it."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    on_host: bool = False  # all three lie in the host's memory, whatever the device is


@runtime_checkable
class Strategy(Protocol):
    """How the ranks hold the model together: who keeps which weights, gradients and optimizer state, and when they exchange them.

    What a strategy cuts among the ranks is a DTensor of which each has some rows (`is_cut`), wherever one meets it: a parameter, its
    gradient, a tensor of the optimizer. All else is alike on all ranks after a step, unless it is `Synchronising`. The gradients of a step
    are the mean over the ranks of what backward gave each: the loop multiplies its loss by their number.
    """

    has_buckets: bool
    """Whether the first backwards decide in which order the values of the ranks are added, as DDP's buckets do: a run that resumes takes
    two before its checkpoint is loaded."""

    computes_together: bool
    """Whether every forward of the model is a collective: all ranks must take as many, also in evaluation and in callbacks."""

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        """Return the module to train, on `device`, with rank 0's weights. Collective.

        Called again with the same model when other parameters of it are to be trained than before (`requires_grad`).

        Args:
            model: what computes the loss: the model and the objective in one module (`Joint`), whose forward takes a batch and returns the
                loss. For `ddp-train evaluate` the model alone.
        """

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for forward and backward of all micro-batches of a step but the last: gradients need not be exchanged there."""

    def keeps_gradients(self, module: nn.Module) -> bool:
        """Tell whether gradients are better zeroed where they are than given back, where a step has several micro-batches."""

    def share(self, optimizer: Optimizer) -> None:
        """Let the optimizer step as the ranks share its work: by its hooks. Called once, before its first step; not for one rank alone.

        Raises:
            ConfigError: the strategy cannot do it with this optimizer.
        """

    def state_like(self, parameter: nn.Parameter) -> Tensor:
        """Return a tensor that is cut among the ranks as what the optimizer keeps for a parameter: itself, or a shard of it."""

    def rest(self, module: nn.Module) -> None:
        """Let nothing be left of forwards that no backward follows: after an evaluation, say."""

    def shards(self, world_size: int) -> Shards:
        """Return among how many of so many ranks the parts of a run will be cut. Asked before anything is: `ddp-train plan` does."""


@runtime_checkable
class Casting(Protocol):
    """A strategy that may let weights travel and compute in another type than that in which they are kept."""

    def computes_in(self, world_size: int) -> torch.dtype | None:
        """Return that type on so many ranks; None: their own."""


@runtime_checkable
class Synchronising(Protocol):
    """A strategy whose ranks take steps of their own, with weights of their own, and synchronise now and then.

    Each rank's gradients are its share of what the gradient of the global batch is the mean of. Nothing else of a step tells ranks apart:
    all take as many, of the same global batches. What each rank has of its own is saved as its own; what is evaluated, and what others read
    of a checkpoint, is the mean (`joined`).
    """

    are_alike: bool
    """Whether all ranks have the same weights and buffers. Set when a checkpoint is loaded."""

    steps_alone: bool
    """Whether there are steps in which ranks exchange nothing, and so do not know what the others have."""

    def begin(self, trained: nn.Module) -> None:
        """Say that training begins, or goes on, from the weights as they are now, and from the state that was loaded last, if any."""

    def after_step(self, step: int) -> None:
        """Say that the run's step of that number was taken. Collective where the ranks synchronise after it."""

    def joined(self, trained: nn.Module, averages: Iterable[Tensor]) -> AbstractContextManager[Mapping[Place, Tensor]]:
        """Let weights and buffers, and averages of them, be the mean over the ranks; then each rank's own again, to the bit. Collective.

        It may be entered twice.

        Yields:
            This rank's own values of all that was changed, by where they lie (`place_of`).
        """

    def num_copies(self, world_size: int) -> int:
        """Return how many copies of the weights, in float32 at least, each of so many ranks keeps for it: what `state_dict` has."""

    def state_dict(self) -> dict[str, Any]:
        """Return what else a synchronisation needs, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take the state of a checkpoint; {}: it has none."""


@runtime_checkable
class Reducing(Protocol):
    """A strategy that exchanges the gradients of a step itself, after its last backward, and keeps something of each rank for the next.

    What it keeps is saved as the rank's own. Another number of ranks goes on without it.
    """

    def reduce(self, trained: nn.Module, step: int) -> None:
        """Put what stands for the mean over the ranks into the place of each gradient. Collective.

        Args:
            step: how many the run has taken.
        """

    def num_bytes_kept(self, trained: nn.Module, world_size: int) -> int:
        """Return how many bytes each of so many ranks keeps for it."""

    def own_state(self) -> dict[str, Any]:
        """Return what this rank keeps."""

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint; {}: it has none."""


Place = tuple[int, torch.Size]
"""Where a tensor lies: of its memory the address, and its shape."""


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor lies. Views of the whole of it, as `state_dict` gives them, lie at the same place."""
    return tensor.data_ptr(), tensor.shape


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
