"""Find a loss, or a value of an evaluation, that is no mean over samples: that of a batch must be that of its halves.

Else another split into micro-batches and ranks would give another gradient, without a word; and an evaluation another metric.
"""

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Indices, Objective, draw
from ddp_train.interfaces.batch import batch_size, map_tensors, normalise_and_mix
from ddp_train.interfaces.objective import HALF, ValueShapeError, evaluate_batch, loss_sum, value_sums
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch, as_micro_batch
from ddp_train.objective.supervised import LossObjective
from ddp_train.training.parts.components import EvaluationComponents
from ddp_train.training.seeding import random_state
from ddp_train.traits import ObjectiveConstants, constants_of, name_of

logger = logging.getLogger(__name__)

_SIZES = (64, 8, 4)  # of samples whose loss is compared with that of their halves; in few samples, chance makes the halves differ most
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 2e-2  # share by which the two may differ; in half precision
_CALLS = 10  # times as much as the second call differs from the first may the others: a model that counts its calls
_MAX_NOISE = 0.05  # a number that differs by a larger share between two equal calls says nothing
_MORE_FOR_GRADIENTS = 3  # which are sums of numbers that cancel
_GRADIENT, _UNITS_PER_SAMPLE = "gradient", "units per sample"


@dataclass(frozen=True)
class Trial:
    """A batch that is tried."""

    name: str
    trains: bool  # False: it is evaluated
    micro_batch: MicroBatch
    ids: Indices | None = None  # of its samples; None: they have none
    source: Any = None  # the data that it is of

    @property
    def batch(self) -> Batch:
        """The batch as a model gets it."""
        return normalise_and_mix(self.micro_batch.batch)


def refuse_dependent(components: EvaluationComponents, trial: Trial, world: World) -> None:
    """Refuse an objective whose loss (in training) or values (in evaluation) of a batch are not those of its halves, added up.

    In training the gradient of one weight must be, too: losses of a fresh model are all alike, whatever they are divided by.
    """
    objective = components.objective
    if trial.micro_batch.is_stand_in or constants_of(objective, ObjectiveConstants).compares_samples:
        return
    model = components.model.eval()  # no dropout
    is_half = components.amp.dtype is not None or any(parameter.dtype in HALF for parameter in model.parameters())
    weight = _last_matrix(model) if trial.trains and not components.forward_is_collective else None
    tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
    for max_samples in _sizes(trial):
        sums: list[dict[str, Tensor]] = []
        try:
            with batch_on(world.device, trial.micro_batch) as whole:
                tried = _whole_and_halves(trial, whole, max_samples)
            streams = _streams(world.device)
            for place, micro_batch in tried:
                source = partial(draw.Source, components.seed, place, device=world.device)  # a sample draws the same in the halves
                with batch_on(world.device, micro_batch) as batch, source(batch=batch), components.amp.autocast(world.device):
                    sums.append(_loss_sums(objective, model, batch, weight) if trial.trains else _value_sums(objective, model, batch))
        except ValueShapeError as error:  # a number of the batch's samples by chance
            happened = f"{name_of(objective)}: {error}"
            raise ConfigError(key="objective", happened=happened, expected="one value for each sample") from error
        except Exception as error:
            logger.info("could not check whether loss and values are those of samples: %s: %s", type(error).__name__, error)
            return
        if _streams(world.device) != streams:
            tolerance = math.inf  # what is drawn at random is another for the halves: the numbers show a sum alone
        for name in sums[0]:
            _compare(objective, name, [of_batch[name].double() for of_batch in sums], tolerance)


def _sizes(trial: Trial) -> list[int]:
    """Return the numbers of samples that are compared: no larger than the micro-batch twice."""
    known = None if trial.micro_batch.num_samples is not None else batch_size(trial.batch)
    return [size for number, size in enumerate(_SIZES) if number == 0 or known is None or size < known]


def _streams(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the random streams, which can be compared."""
    state = random_state(device)
    keys, *positions = state["numpy"]
    tensors = (keys, state["torch"], *([state["cuda"]] if "cuda" in state else []))
    return state["python"], *positions, *(tensor.numpy().tobytes() for tensor in tensors)


def _compare(objective: Objective, name: str, sums: list[Tensor], tolerance: float) -> None:
    """Compare what some samples give with what they give once more, and with what their halves give."""
    whole, again, first, second = sums
    if name == _UNITS_PER_SAMPLE:
        if whole == first == second:
            return
        happened = f"{name_of(objective)}'s loss is a Ratio over an int, which is not as large for each sample"
        raise ConfigError(key="objective", happened=happened, expected="a tensor as the denominator, whose sum is taken")
    size, noise = float(first.norm() + second.norm()), float((whole - again).norm())
    if not math.isfinite(size + noise) or not size or noise > _MAX_NOISE * size:
        return  # a random number says nothing
    is_sum = whole.ndim == 0 and bool(first + second) and bool(1.6 < whole / (first + second) < 2.5)
    allowed = size * tolerance * (_MORE_FOR_GRADIENTS if name == _GRADIENT else 1) + _CALLS * noise
    if is_sum or float((whole - first - second).norm()) > allowed:
        raise _dependence_error(objective, name, is_sum=is_sum)


def _last_matrix(model: nn.Module) -> nn.Parameter | None:
    """Return the last weight of a model that is more than a row: its gradient needs little of a backward, and tells samples apart."""
    return next((parameter for parameter in reversed([*model.parameters()]) if parameter.requires_grad and parameter.ndim > 1), None)


def _loss_sums(objective: Objective, model: nn.Module, batch: Batch, weight: nn.Parameter | None) -> dict[str, Tensor]:
    """Return the loss of a batch, its units, and the gradient of a weight."""
    with torch.enable_grad():
        loss = loss_sum(objective, model, batch)
        gradients = torch.autograd.grad(loss.total, [weight], allow_unused=True) if weight is not None else [None]
    units = loss.num_units
    named_units = {_UNITS_PER_SAMPLE: units / batch_size(batch)} if isinstance(units, int) else {"units of the loss": units}
    sums = {"loss": loss.total.detach()} | {name: torch.as_tensor(number) for name, number in named_units.items()}
    return sums if gradients[0] is None else sums | {_GRADIENT: gradients[0]}


@torch.no_grad()
def _value_sums(objective: Objective, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the numerators and denominators of the values of a batch."""
    sums, size = {}, batch_size(batch)
    for name, value in evaluate_batch(objective, model, batch).values.items():
        sums[name], units = value_sums(name, value, size)
        sums[f"units of {name}"] = torch.as_tensor(units)
    return sums


def _dependence_error(objective: Objective, name: str, *, is_sum: bool) -> ConfigError:
    loss_fn = getattr(objective, "loss_fn", None) if isinstance(objective, LossObjective) else None
    subject = f"{name_of(objective)}'s {name}" if loss_fn is None else getattr(loss_fn, "__name__", type(loss_fn).__name__)
    expected = "the mean over the batch's samples, shape [], or one value for each sample, shape [B]"
    if is_sum:
        fix = "the mean" if loss_fn is None else "objective.reduction=mean"
        return ConfigError(key="objective", happened=f"{subject} is the sum over the batch", expected=expected, fix=fix)
    happened = f"{subject} of a batch is not the mean of its halves': it would change with the number of ranks"
    fix = "Ratio(numerator, denominator) for a mean over tokens or weights (a loss function: reduction=none);"
    fix += " BatchLoss as the base of one that compares samples; sanity_check=false if it is meant"
    return ConfigError(key="objective", happened=happened, expected=expected, fix=fix)


def _whole_and_halves(trial: Trial, batch: Batch, max_samples: int) -> list[tuple[int, MicroBatch]]:
    """Return some samples of a micro-batch, the same again, and their halves: by rows, or read anew where rows are not samples.

    Each has the number of its first sample with it.

    Raises ValueError: there are not two samples.
    """
    size = batch_size(batch) if trial.micro_batch.num_samples is None else 0
    half = min(max_samples, size) // 2
    spans = ((0, 2 * half), (0, 2 * half), (0, half), (half, 2 * half))

    def rows(tensor: Tensor, *, span: tuple[int, int]) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] != size:
            raise ValueError("the batch's tensors do not share one leading dimension")
        return tensor[slice(*span)]

    if half == 0 and size:
        raise ValueError("it has one sample")
    try:
        return [(span[0], MicroBatch(map_tensors(partial(rows, span=span), batch))) for span in spans]
    except ValueError:
        if trial.ids is None or trial.source is None:
            raise
        half = min(max_samples, len(trial.ids)) // 2
        parts = [(start, trial.ids[start:end]) for start, end in ((0, 2 * half), (0, 2 * half), (0, half), (half, 2 * half))]
        return [(start, as_micro_batch(trial.source.batch(part), len(part))) for start, part in parts]
