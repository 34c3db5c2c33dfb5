"""Try one training batch and one batch of each evaluation set on the bare model, before the first step.

So a mismatch of data, model and objective costs seconds, and not the first epoch; it ends the run on one screen that names the config keys,
shapes and types. A rank that finds a fault ends like one that fails in training: nothing here is collective. Random streams, buffers, modes
and the data's position are put back, so that a run computes the same with and without (docs/decisions/0019-sanity-check.md).

The check also finds a loss that is no mean over samples: that of a batch must be that of its halves. Else another split into micro-batches
and ranks would give another gradient, without a word; and an evaluation another metric.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DistError

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, UserError, one_line
from ddp_train.interfaces import Batch, BatchLoss, Indices, Objective, Value
from ddp_train.interfaces.batch import batch_size, describe, map_tensors, normalise_and_mix, tensors_of
from ddp_train.interfaces.objective import HALF, ValueShapeError, evaluated, value_sums, whole_loss
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch, as_micro_batch
from ddp_train.objective.supervised import LossObjective
from ddp_train.system.stack_dump import user_line
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.check.rehearsal import restoring_state
from ddp_train.training.parts import metric
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.traits import ObjectiveConstants, constants_of

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 64  # whose loss is compared with that of their halves
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 2e-2  # share by which the two may differ; in half precision
_MAX_NOISE = 0.05  # a number that differs by a larger share between two equal calls says nothing
_MORE_FOR_GRADIENTS = 3  # which are sums of numbers that cancel
_GRADIENT, _UNITS_OF_SHAPE = "gradient", "units of the shape"
_MAX_CHARACTERS = 160  # of the description of a batch or an output: a dict may have many tensors


@dataclass(frozen=True)
class _Trial:
    name: str
    trains: bool  # False: it is evaluated
    micro_batch: MicroBatch
    ids: Indices | None = None  # of its samples; None: they have none
    source: Any = None  # the data that it is of

    @property
    def batch(self) -> Batch:
        """The batch as a model gets it."""
        return normalise_and_mix(self.micro_batch.batch)


def try_first_batches(components: Components, first: MicroBatch, world: World, position: int) -> None:
    """Try the first micro-batch of training and the first of each evaluation set; rank 0 prints a line for each.

    `position`: the data's. Raises ConfigError: data, model and objective do not fit.
    DataError: a label is out of range.
    """
    lines = []
    with restoring_state(components, world.device), without_compiling():  # hooks on a forward would be compiled into it
        for trial in _trials(components, first, position):
            lines.append(_try(components, trial, world))
            _refuse_dependent(components, trial, world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # steps need blocks of other sizes
    world.print(*(f"tried    {line}" for line in lines))


def _trials(components: Components, first: MicroBatch, position: int) -> Iterator[_Trial]:
    loader = components.train_loader
    yield _Trial("the first training batch", True, first, loader.sample_ids(position, 0), loader.source)
    for set_name, eval_loader in components.eval_loaders.items():
        if (evaluated := eval_loader.peek()) is not None:
            name = f"the first batch of evaluation set {set_name}" if set_name else "the first evaluation batch"
            yield _Trial(name, False, evaluated, eval_loader.sample_ids(0), eval_loader.source)


def try_training(components: Components, micro_batch: MicroBatch, world: World) -> None:
    """Try a micro-batch of training alone, and print nothing; raises as `try_first_batches` does."""
    with restoring_state(components, world.device), without_compiling():
        _try(components, _Trial("the first training batch", True, micro_batch), world)


def _try(components: EvaluationComponents, trial: _Trial, world: World) -> str:
    """Run one batch as training or evaluation does, and return its line for the screen. No backward: that of the first step comes soon."""
    model, objective, micro_batch, forward = components.model, components.objective, trial.micro_batch, _ForwardShapes()
    model.train(trial.trains)
    loss_text = ""
    try:
        recording = _recording(model, forward, lambda: _refuse_labels(objective, forward, trial))
        with batch_on(world.device, micro_batch) as batch, components.amp.autocast(world.device), recording:
            if trial.trains:
                loss = whole_loss(objective, model, batch)
                _require_device("loss", loss.total, world)
                if not loss.total.requires_grad:
                    raise TypeError("loss does not depend on the parameters: is there a detach(), argmax or no_grad on its way?")
                if forward.is_finite and loss.total.isnan():
                    raise ValueError("loss is NaN, and all that the model gives is finite: replace masked values with where, 0 * NaN is NaN")
                num_units = float(loss.num_units)
                loss_text = f", loss {loss.total.item() / num_units:.4g}" if num_units else ""
            else:
                with torch.no_grad():
                    measured = components.evaluate_batch(batch)
                _require_values(objective, measured.values, batch_size(batch), world, is_stand_in=micro_batch.is_stand_in)
                if not micro_batch.is_stand_in:
                    metric.update(components.evaluation_metrics, measured.compared)
                    metric.require_numbers(components.evaluation_metrics)
    except (UserError, OSError, DistError):
        raise
    except Exception as error:
        if _is_machine_error(error):
            raise
        raise _mismatch_error(error, components, trial, forward) from error
    device = next((tensor.device for tensor in tensors_of(batch)), world.device)
    gives = f", the model gives {forward.gives}" if forward.gives else ""  # an objective may call parts of the model alone
    name = trial.name.removeprefix("the first ").removeprefix("batch of ")
    return f"{name} {one_line(describe(trial.batch), _MAX_CHARACTERS)} on {device}{one_line(gives, _MAX_CHARACTERS)}{loss_text}"


def _require_device(name: str, value: Tensor, world: World) -> None:
    if value.device.type != world.device.type:
        raise TypeError(f"{name} is on {value.device}, and not on {world.device}")


def _require_values(objective: Objective, values: Mapping[str, Value], size: int, world: World, *, is_stand_in: bool) -> None:
    totals = metric.ValueTotals()
    totals.add(values, size=size, counts=True)
    for name, value in values.items():
        _require_device(f"evaluate's {name!r}", value_sums(name, value, size)[0], world)
    if is_stand_in:
        return
    try:
        metrics = objective.metrics(totals.means(lambda values: values))
    except KeyError as error:
        raise TypeError(f"metrics asks for {error}, and evaluate gives {', '.join(values)}") from error
    except Exception as error:  # one batch may be too small for a metric
        logger.info("the metrics could not be checked: %s: %s", type(error).__name__, error)
        return
    for name, number in metrics.items():
        if not isinstance(number, (int, float)):
            raise TypeError(f"metrics gives {describe(number)} as {name!r}, and not a number")


def _is_machine_error(error: Exception) -> bool:
    """Tell whether an error is no mismatch of data, model and objective: another rank is gone, or the device failed."""
    text = str(error)
    return "gloo/transport" in text or is_out_of_memory(error) or ("CUDA error" in text and "device-side assert" not in text)


def _mismatch_error(error: Exception, components: EvaluationComponents, trial: _Trial, forward: _ForwardShapes) -> ConfigError:
    """Return an error that shows the shapes from the data through the model into the objective, with the first error's message and line."""
    model, objective, batch = components.model, components.objective, trial.batch
    types = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
    loss = objective.loss_fn if isinstance(objective, LossObjective) else objective
    fix = ""
    if "DTensor" in str(error) or "root module first" in str(error):
        fix = "strategy=ddp or zero1; under fsdp the weights are whole in the model's forward only, not in its other methods"
    elif isinstance(batch, Mapping) and not forward.gives:
        fix = f"loader.fields=[{','.join(map(str, batch))}] takes these keys of each sample, in this order; or an objective for dicts"
    return ConfigError(
        key="data, objective" if not forward.takes else "model" if not forward.gives else "objective",
        happened=f"{trial.name} fails: {type(error).__name__}: {error}\n"
        f"  {user_line(error)}\n"
        f"  data       gives {describe(batch)}\n"
        f"  model      {type(model).__name__} ({types}) {forward}\n"
        f"  objective  {getattr(loss, '__name__', type(loss).__name__)}",
        expected="data, model and objective that fit together",
        fix=fix,
    )


def _refuse_labels(objective: Objective, forward: _ForwardShapes, trial: _Trial) -> None:
    """Refuse labels out of range, in the batch and in all of the data, before the loss gets them: on a GPU it would end the process."""
    loss, batch = getattr(objective, "loss_fn", None), trial.batch
    says_so = constants_of(objective, ObjectiveConstants).labels_are_classes
    takes_classes = says_so or isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    if not takes_classes or len(forward.scores) != 1 or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    targets, shape = batch[1], forward.scores[0]
    if len(shape) != 2 or not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != shape[:1]:
        return
    labels, num_classes, ids, name = targets.cpu().numpy(), shape[1], trial.ids, trial.name
    if trial.micro_batch.bad_samples or trial.micro_batch.num_samples is not None or (ids is not None and len(ids) != len(labels)):
        ids = None  # a sample is missing
    of_source = getattr(trial.source, "labels", None)
    if ids is not None and isinstance(of_source, (np.ndarray, Tensor)) and np.array_equal(np.asarray(of_source)[ids], labels):
        labels = np.asarray(of_source)  # on which the model is trained
        ids, name = np.arange(len(labels)), name.replace("first ", "").replace("batch", "data")
    ignored = getattr(objective if says_so else loss, "ignore_index", None)
    outside = np.argwhere(((labels < 0) | (labels >= num_classes)) & (True if ignored is None else labels != ignored))
    if len(outside):
        first = int(outside[0][0])
        sample = f"sample {ids[first]}" if ids is not None else f"sample number {first + 1} of the batch"
        raise DataError(
            key="data",
            happened=f"label {labels[first]} of {sample} is out of range: the model's output has {num_classes} classes"
            f" ({len(outside)} of {labels.size} labels of {name})",
            expected=f"labels from 0 to {num_classes - 1}",
            fix="data whose labels count from 0, or a model with more classes",
        )


def _refuse_dependent(components: EvaluationComponents, trial: _Trial, world: World) -> None:
    """Refuse an objective whose loss (in training) or values (in evaluation) of a batch are not those of its halves, added up.

    In training the gradient of one weight must be, too: losses of a fresh model are all alike, whatever they are divided by.
    """
    objective = components.objective
    if trial.micro_batch.is_stand_in or isinstance(objective, BatchLoss):
        return
    model = components.model.eval()  # no dropout
    is_half = components.amp.dtype is not None or any(parameter.dtype in HALF for parameter in model.parameters())
    tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
    weight = _last_matrix(model) if trial.trains and not components.forward_is_collective else None
    sums: list[dict[str, Tensor]] = []
    try:
        with batch_on(world.device, trial.micro_batch) as whole:
            tried = _whole_and_halves(trial, whole)
        for micro_batch in tried:
            with batch_on(world.device, micro_batch) as batch, components.amp.autocast(world.device):
                sums.append(_loss_sums(objective, model, batch, weight) if trial.trains else _value_sums(objective, model, batch))
    except ValueShapeError as error:  # a number of the batch's samples by chance
        raise ConfigError(key="objective", happened=f"{type(objective).__name__}: {error}", expected="one value for each sample") from error
    except Exception as error:
        logger.info("could not check whether loss and values are those of samples: %s: %s", type(error).__name__, error)
        return
    for name in sums[0]:
        whole_sum, again, first, second = (of_batch[name].double() for of_batch in sums)
        if name == _UNITS_OF_SHAPE and first != second:
            raise _dependence_error(objective, "denominator, an int,", is_sum=False)
        size, noise = float(first.norm() + second.norm()), float((whole_sum - again).norm())
        if not math.isfinite(size + noise) or not size or noise > _MAX_NOISE * size:
            continue  # a random number says nothing
        is_sum = whole_sum.ndim == 0 and bool(first + second) and 1.6 < whole_sum / (first + second) < 2.5
        allowed = size * tolerance * (_MORE_FOR_GRADIENTS if name == _GRADIENT else 1)
        if is_sum or (float((whole_sum - first - second).norm()) > allowed and noise <= allowed):
            raise _dependence_error(objective, name, is_sum=is_sum)


def _last_matrix(model: nn.Module) -> nn.Parameter | None:
    """Return the last weight of a model that is more than a row: its gradient needs little of a backward, and tells samples apart."""
    return next((parameter for parameter in reversed([*model.parameters()]) if parameter.requires_grad and parameter.ndim > 1), None)


def _loss_sums(objective: Objective, model: nn.Module, batch: Batch, weight: nn.Parameter | None) -> dict[str, Tensor]:
    """Return the loss of a batch, its units, and the gradient of a weight."""
    with torch.enable_grad():
        loss = whole_loss(objective, model, batch)
        gradients = torch.autograd.grad(loss.total, [weight], allow_unused=True) if weight is not None else [None]
    units = _UNITS_OF_SHAPE if isinstance(loss.num_units, int) else "units of the loss"
    sums = {"loss": loss.total.detach(), units: torch.as_tensor(loss.num_units)}
    return sums if gradients[0] is None else sums | {_GRADIENT: gradients[0]}


@torch.no_grad()
def _value_sums(objective: Objective, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the numerators and denominators of the values of a batch."""
    sums, size = {}, batch_size(batch)
    for name, value in evaluated(objective, model, batch).values.items():
        sums[name], units = value_sums(name, value, size)
        sums[f"units of {name}"] = torch.as_tensor(units)
    return sums


def _dependence_error(objective: Objective, name: str, *, is_sum: bool) -> ConfigError:
    loss_fn = getattr(objective, "loss_fn", None) if isinstance(objective, LossObjective) else None
    subject = f"{type(objective).__name__}'s {name}" if loss_fn is None else getattr(loss_fn, "__name__", type(loss_fn).__name__)
    expected = "the mean over the batch's samples, shape [], or one value for each sample, shape [B]"
    if is_sum:
        fix = "the mean" if loss_fn is None else "objective.reduction=mean"
        return ConfigError(key="objective", happened=f"{subject} is the sum over the batch", expected=expected, fix=fix)
    happened = f"{subject} of a batch is not the mean of its halves': it would change with the number of ranks"
    fix = "Ratio(numerator, denominator) for a mean over tokens or weights (a loss function: reduction=none);"
    fix += " BatchLoss as the base of one that compares samples; sanity_check=false if it is meant"
    return ConfigError(key="objective", happened=happened, expected=expected, fix=fix)


def _whole_and_halves(trial: _Trial, batch: Batch) -> list[MicroBatch]:
    """Return some samples of a micro-batch, the same again, and their halves: by rows, or read anew where rows are not samples.

    Raises ValueError: there are not two samples.
    """
    size = batch_size(batch) if trial.micro_batch.num_samples is None else 0
    half = min(_MAX_SAMPLES, size) // 2
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
        return [MicroBatch(map_tensors(partial(rows, span=span), batch)) for span in spans]
    except ValueError:
        if trial.ids is None or trial.source is None:
            raise
        half = min(_MAX_SAMPLES, len(trial.ids)) // 2
        parts = [trial.ids[start:end] for start, end in ((0, 2 * half), (0, 2 * half), (0, half), (half, 2 * half))]
        return [as_micro_batch(trial.source.batch(part), len(part)) for part in parts]


@dataclass
class _ForwardShapes:
    """Types and shapes of what the model took and gave in its first forward. "": it did not get there."""

    takes: str = ""
    gives: str = ""
    scores: list[torch.Size] = field(default_factory=list)  # the shapes of outputs that could be scores of classes
    is_finite: bool = False

    def __str__(self) -> str:
        return (f"takes {self.takes}" if self.takes else "was not called yet") + (f", gives {self.gives}" if self.gives else "")


@contextmanager
def _recording(model: nn.Module, forward: _ForwardShapes, then: Callable[[], None]) -> Iterator[None]:
    """Record the first forward within, and call `then` after it."""

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [*args, *([kwargs] if kwargs else [])]
        forward.takes = forward.takes or describe(inputs[0] if len(inputs) == 1 else tuple(inputs))

    def after(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not forward.gives:
            forward.gives = describe(output)
            forward.scores = [tensor.shape for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.ndim > 1]
            forward.is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors_of(output))
            then()

    with model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after):
        yield


def without_compiling() -> AbstractContextManager[Any]:
    """Run compiled models as they are written: other shapes would be compiled for nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
