"""What an objective must offer: the loss that training minimises, and what an evaluation measures. And what computes its loss.

Its methods return values for each sample. The loop knows how many samples it has asked for: it adds up, over micro-batches and ranks, and
divides once. So nothing is declared as a sum or a mean:

a tensor [B]                        one value for each sample; the mean over all samples is minimised, or reported
a tensor []                         the mean over the batch's samples, as torch's losses return it
`Ratio(numerator, denominator)`     a mean over something else (tokens, pixels): both are added up, then divided

Components take plain keyword arguments and know nothing of Hydra. What has no interface here is torch's own: a model is an `nn.Module`, an
optimizer is torch's. A loss function is adapted by objective/supervised.py. Shapes: B samples, K columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.interfaces.batch import Batch, batch_size, call_model, describe
from ddp_train.traits import Adapted, Goal, ObjectiveConstants, unadapted

HALF = (torch.float16, torch.bfloat16)
TARGETS = ("target", "targets", "label", "labels")  # names of the targets in a batch that is a dict
_is_in_step: ContextVar[bool] = ContextVar("is_in_step", default=False)


class Ratio(NamedTuple):
    """A mean that is not over samples: the sum of one over the sum of the other, in all batches, on all ranks.

    With a mask: `Ratio((losses * mask), mask)`, or where masked values may be infinite, `Ratio(losses.where(mask, 0), mask)`.
    """

    numerator: Tensor  # any shape
    denominator: Tensor | int  # any shape; an int: the number of the batch, as many for each sample, which spares one small all-reduce
    by_column: bool = False  # both are [B, K], and give K numbers: one for each class


Value = Tensor | Ratio


class ValueShapeError(TypeError):
    """A value has neither one number for each sample, nor is it one of the other forms."""


class Evaluated(NamedTuple):
    """All that one forward of a batch gives to an evaluation."""

    values: Mapping[str, Value]  # of which the means are reported
    rows: Mapping[str, Tensor] = {}  # more to save for each sample (`evaluation.save_predictions`): name -> [B, ...], alike in every batch
    compared: tuple[Any, Any] | None = None  # for `evaluation.metrics`: predictions as torchmetrics takes them (probabilities), targets


class Objective(ObjectiveConstants, ABC):
    """A task: its loss, and what its evaluation reports. `loss` alone is enough.

    `model` is the user's own on any number of ranks: it may be called several times, and so may methods of it.
    One that is an `nn.Module` may have parameters (a temperature, centres) and buffers: they are trained, shared and saved as the model's.
    """

    goals: Mapping[str, Goal] = {"loss": "min"}
    """The reported metrics that have a better end, the headline one first: `ddp-train runs`, the best checkpoint and sweeps go by it."""

    unit: str = "sample"
    """What the denominator of a loss that is a `Ratio` counts: token, next_token (tokens that another one comes before) or another word."""

    borrows: Mapping[str, str] = {}
    """Name of a part of the objective, an `nn.Module` (a teacher) -> the weights that it begins with, as `init_from` takes them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Value:
        """Return the loss of each sample, shape [B], their mean, shape [], or a `Ratio`, with gradient."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Value] | Evaluated:
        """Return what is reported, by name: for each sample a number or whether something is so, shape [B]; a mean; a `Ratio`."""
        return {"loss": self.loss(model, batch)}

    def metrics(self, means: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the metrics, from the means of `evaluate`'s values over all samples: numbers, and lists of them for columns.

        By default the means. Override it for what is computed of means: a perplexity, a root. A mean of nothing is 0; in a list, NaN.
        """
        return means

    def inputs(self, batch: Batch) -> Any:
        """Return what `infer` gets of a batch, with or without targets: a tuple or a dict of the model's arguments.

        By default a tensor is the one input; of several in a tuple the last is the targets; of a dict those of TARGETS' names are.
        """
        if isinstance(batch, Mapping):
            return {name: value for name, value in batch.items() if name not in TARGETS}
        if isinstance(batch, (tuple, list)):
            return tuple(batch[:-1] if len(batch) > 1 else batch)
        return (batch,)

    def infer(self, model: nn.Module, inputs: Any) -> Mapping[str, Tensor]:
        """Return one row for each sample without targets, name -> [B, ...], alike in every batch: for `ddp-train predict`.

        `inputs` are those of `inputs(batch)`. By default the tensors that the model returns.
        """
        outputs = call_model(model, inputs)
        if isinstance(outputs, Tensor):
            return {"output": outputs}
        by_name = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs)) if isinstance(outputs, (tuple, list)) else {}
        named = {name if isinstance(name, str) else f"output_{name}": value for name, value in by_name.items()}
        size = batch_size(inputs)
        return {name: value for name, value in named.items() if isinstance(value, Tensor) and value.ndim and len(value) == size}

    def bind_model(self, model: nn.Module) -> None:
        """Look at the model before the first batch, before anything wraps it.

        It has values, which may be copied; a class that reads none may say `binds_without_values = True`, and spares a rank making them.
        """


class TurnObjective(Objective):
    """An objective whose parts take turns within a step, each with a loss and parameters of its own: a GAN, actor and critic.

    One optimizer step of each turn makes a step of the run. All turns of a step get the same micro-batches.
    """

    @property
    @abstractmethod
    def turns(self) -> Mapping[str, Sequence[str]]:
        """Name of a turn -> the parameters that it trains, as `matching` takes them, in their order; each parameter is in one at least."""

    @abstractmethod
    def turn_loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        """Return one turn's loss with gradient: of each sample, shape [B], or their mean, shape []. Any part of the model may be called."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the turns' losses, shape []."""
        return torch.stack([self.turn_loss(model, batch, turn).float().mean() for turn in self.turns]).sum()

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Value] | Evaluated:
        """Return the loss of each turn by the turn's name."""
        return {f"loss_{turn}": self.turn_loss(model, batch, turn) for turn in self.turns}

    def turns_at(self, step: int) -> Sequence[str]:
        """Return the turns of the step that comes after `step` steps, one at least, in their order, the same on every rank."""
        return list(self.turns)


class BatchLoss(Objective):
    """An objective whose loss compares the samples of a batch with each other: contrastive learning, Dice over a batch.

    `loss` returns the mean, shape []. It depends on which samples come together: those of a rank's micro-batch, which changes with the
    number of ranks; or, with `gathers`, those of the whole global batch, whatever the number of ranks.
    """

    compares_samples = True
    gathers: bool = False
    """Whether `gather` returns the rows of all ranks. It needs one micro-batch a step, and as many samples on each rank."""

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of the global batch, [B, ...] of each rank -> [all, ...], with gradient. Collective, in a training step alone."""
        if not (self.gathers and _is_in_step.get() and dist.is_initialized() and dist.get_world_size() > 1):
            return rows
        gathered: Tensor = _GatherRows.apply(rows)  # type: ignore[no-untyped-call]
        return gathered


class AdaptedObjective(Adapted, Objective, base=Objective):
    """An objective whose class does not inherit from ours."""

    def loss(self, model: nn.Module, batch: Batch) -> Value:
        loss: Value = self.wrapped.loss(model, batch)
        return loss


class AdaptedTurns(Adapted, TurnObjective, base=TurnObjective):
    """One of turns whose class does not inherit from ours."""

    @property
    def turns(self) -> Mapping[str, Sequence[str]]:
        turns: Mapping[str, Sequence[str]] = self.wrapped.turns
        return turns

    def turn_loss(self, model: nn.Module, batch: Batch, turn: str) -> Tensor:
        loss: Tensor = self.wrapped.turn_loss(model, batch, turn)
        return loss


def module_of(objective: Objective) -> nn.Module | None:
    """Return the objective as a module, which may have weights and buffers; None: it is none."""
    part = unadapted(objective)
    return part if isinstance(part, nn.Module) else None


class _GatherRows(torch.autograd.Function):
    """Gathers rows of all ranks; a row's gradient is the sum of those that the ranks compute for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.size = len(rows)
        gathered = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather(list(gathered.split(len(rows))), rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)  # gloo cannot scatter the sum
        return summed.narrow(0, dist.get_rank() * ctx.size, ctx.size)


class LossSum(NamedTuple):
    """A batch's loss as the loop adds it up: `value` times `times` is the sum over the units."""

    value: Tensor  # shape [], at least float32
    num_units: int | Tensor  # samples, or what a `Ratio` is over; an int: as many for each sample
    times: int = 1  # a mean is multiplied where backward begins: a product of its own takes 8 us of a step

    @property
    def total(self) -> Tensor:
        """The sum over the units, shape []."""
        return self.value * self.times


def loss_sum(objective: Objective, model: nn.Module, batch: Batch, turn: str | None = None) -> LossSum:
    """Return the training loss of a batch, added up; of one turn, or of all turns together. Called in every step.

    Raises ValueShapeError: the loss has another shape.
    """
    loss: Value = objective.loss(model, batch) if turn is None else cast(TurnObjective, objective).turn_loss(model, batch, turn)
    size = batch_size(batch)
    if isinstance(loss, Ratio) and turn is not None:
        raise ValueShapeError("turn_loss gives a Ratio, and all turns of a step are divided by the same number: that of the samples")
    if isinstance(loss, Ratio) and not loss.by_column:  # all turns of a step are divided by the same number
        units = loss.denominator
        return LossSum(_added(loss.numerator), units.sum() if isinstance(units, Tensor) else units)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return LossSum(loss.float() if loss.dtype in HALF else loss, size, times=size)
    if isinstance(loss, Tensor) and loss.shape == (size,):
        return LossSum(_added(loss), size)
    raise ValueShapeError(f"loss gives {describe(loss)} for {_expected(size)}")


def evaluate_batch(objective: Objective, model: nn.Module, batch: Batch) -> Evaluated:
    """Return what an objective's `evaluate` gives for a batch; the values of samples are rows, too."""
    result = objective.evaluate(model, batch)
    given = result if isinstance(result, Evaluated) else Evaluated(result)
    if not isinstance(given.values, Mapping):
        raise ValueShapeError(f"evaluate gives {describe(result)}, and not values by name")
    size = batch_size(batch)
    rows = {name: value for name, value in given.values.items() if isinstance(value, Tensor) and value.shape == (size,)}
    return given._replace(rows={**rows, **given.rows})


def value_sums(name: str, value: Value, size: int) -> tuple[Tensor, Tensor | int]:
    """Return a value of `evaluate` added up over a batch of `size` samples: numerator and denominator, int64 or float64, [] or [K].

    Raises ValueShapeError: it has another shape.
    """
    if isinstance(value, Ratio):
        columns = 0 if value.by_column else None
        divisor = value.denominator
        return _exact(value.numerator, columns), _exact(divisor, columns) if isinstance(divisor, Tensor) else divisor
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.double() * size, size
    if isinstance(value, Tensor) and value.shape == (size,):
        return _exact(value, None), size
    raise ValueShapeError(f"evaluate gives {describe(value)} as {name!r} for {_expected(size)}")


def _expected(size: int) -> str:
    return f"{size} samples, and not one value for each, [{size}], their mean, [], or a Ratio"


def _exact(values: Tensor, dim: int | None) -> Tensor:
    dtype = torch.float64 if values.is_floating_point() else torch.int64
    return values.sum(dtype=dtype) if dim is None else values.sum(dim=dim, dtype=dtype)


def _added(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32) if values.dtype in HALF else values.sum()


class LossModule(nn.Module):
    """Computes the loss of a batch in its forward, which is what a strategy wraps.

    So the objective has the model itself, on two ranks as on one: it may call the model several times, call methods of it, and read its
    attributes. A strategy that wrapped the model alone would see none but calls of its forward, and would hide all else.

    Args:
        has_state: the objective's weights and buffers, where it is a module, are trained, shared and saved with the model's.
        turn: whose loss; None: the objective takes no turns.
    """

    task: Objective

    def __init__(self, model: nn.Module, objective: Objective, *, has_state: bool = True, turn: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.objective = module_of(objective) if has_state else None  # DDP would send a teacher's buffers in each step
        self.turn = turn
        self.__dict__["task"] = objective  # `nn.Module` is not to see a second one
        self._context = _gathering if isinstance(objective, BatchLoss) and objective.gathers else nullcontext

    def forward(self, batch: Batch) -> LossSum:
        with self._context():
            return loss_sum(self.task, self.model, batch, self.turn)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; that of the objective's parts is its own (a teacher that only evaluates)."""
        self.training = mode
        self.model.train(mode)
        return self


@contextmanager
def _gathering() -> Iterator[None]:
    """Let `BatchLoss.gather` gather: all ranks are here, which they are not where a batch is tried or evaluated."""
    outer = _is_in_step.set(True)
    try:
        yield
    finally:
        _is_in_step.reset(outer)
