"""Try one training batch and one batch of each evaluation set on the bare model, before the first step.

So a mismatch of data, model and objective costs seconds, and not the first epoch; it ends the run on one screen that names the config keys,
shapes and types. A rank that finds a fault ends like one that fails in training: nothing here is collective. Random streams, buffers, modes
and the data's position are put back, so that a run computes the same with and without (docs/decisions/0019-sanity-check.md).

The check also finds a mean where a sum belongs: a sum over some samples doubles when the same samples come twice, and a mean does not. In
training a mean gives 1/B of the gradient, and another gradient for every split into micro-batches and ranks; an evaluation would add it up
once for each batch and rank.
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
from ddp_train.interfaces import AnyObjective, Batch, Indices
from ddp_train.interfaces.batch import batch_size, describe, map_tensors, normalise_and_mix, tensors_of
from ddp_train.interfaces.objective import whole_loss
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

_MAX_SAMPLES = 32  # for the check that sums are sums
_MAX_DEVIATION = 0.05  # a number that differs by more between two equal calls says nothing about sum and mean
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


def try_first_batches(components: Components, first: MicroBatch, world: World, position: int, *, with_predictions: bool) -> None:
    """Try the first micro-batch of training and the first of each evaluation set; rank 0 prints a line for each.

    `position`: the data's; `with_predictions`: evaluations save predictions. Raises ConfigError: data, model and objective do not fit.
    DataError: a label is out of range.
    """
    lines = []
    with restoring_state(components, world.device), without_compiling():  # hooks on a forward would be compiled into it
        for trial in _trials(components, first, position):
            lines.append(_try(components, trial, world, with_predictions=with_predictions))
            _refuse_means(components, trial, world)
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
        _try(components, _Trial("the first training batch", True, micro_batch), world, with_predictions=False)


def _try(components: EvaluationComponents, trial: _Trial, world: World, *, with_predictions: bool) -> str:
    """Run one batch as training or evaluation does, and return its line for the screen. No backward: that of the first step comes soon."""
    model, objective, micro_batch, forward = components.model, components.objective, trial.micro_batch, _ForwardShapes()
    model.train(trial.trains)
    loss_text = ""
    try:
        recording = _recording(model, forward, lambda: _refuse_labels(objective, forward, trial))
        with batch_on(world.device, micro_batch) as batch, components.amp.autocast(world.device), recording:
            if trial.trains:
                num_units = float(objective.weight(trial.batch))
                loss = whole_loss(objective, model, batch)
                if not isinstance(loss, Tensor) or loss.shape != ():
                    raise TypeError(f"loss is {describe(loss)}, and not one number: a tensor of shape []")
                if not loss.requires_grad:
                    raise TypeError("loss does not depend on the parameters: is there a detach(), argmax or no_grad on its way?")
                loss_text = f", loss {loss.item() / num_units:.4g}" if num_units else ""
            else:
                with torch.no_grad():
                    scored = components.evaluate_batch(batch, with_predictions=with_predictions)
                _require_scores(objective, scored.sums, world, is_stand_in=micro_batch.is_stand_in)
                if scored.compared is not None and not micro_batch.is_stand_in:
                    metric.update(components.evaluation_metrics, scored.compared)
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


def _require_scores(objective: AnyObjective, scores: object, world: World, *, is_stand_in: bool) -> None:
    if not isinstance(scores, Mapping):
        raise TypeError(f"score gives {describe(scores)}, and not a dict of sums")
    for name, value in scores.items():
        if not isinstance(value, Tensor) or value.ndim > 1:
            raise TypeError(f"score's {name!r} is {describe(value)}, and neither one number nor a row of them: a tensor of shape [] or [K]")
        if value.device.type != world.device.type:
            raise TypeError(f"score's {name!r} is on {value.device}, and not on {world.device}")
    if is_stand_in:
        return
    try:
        metrics = objective.metrics({name: value.tolist() for name, value in scores.items()})
    except Exception as error:  # one batch may be too small for a metric
        logger.info("the metrics could not be checked: %s: %s", type(error).__name__, error)
        return
    for name, value in metrics.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"metrics gives {describe(value)} as {name!r}, and not a number")


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


def _refuse_labels(objective: AnyObjective, forward: _ForwardShapes, trial: _Trial) -> None:
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


def _refuse_means(components: EvaluationComponents, trial: _Trial, world: World) -> None:
    """Refuse an objective whose loss (in training) or score (in evaluation) is a mean, and a loss function that gives a sum."""
    objective = components.objective
    for name, ratio, once, twice in _growth_of_numbers(components, trial, world):
        if 0.8 < ratio < 1.25:
            fault = "loss gives a mean" if trial.trains else f"score gives {name!r} as a mean"
            fix = f"the sum of {name!r} over the samples, and their number under another name"
            fix = 'reduction="sum", or the mean times what `weight` gives' if trial.trains else fix
            happened = f"{type(objective).__name__}.{fault}: {once:.6g} for some samples, {twice:.6g} for the same ones twice"
            expected = "a sum, which doubles: it is divided once, over all batches and ranks"
            raise ConfigError(key="objective", happened=happened, expected=expected, fix=f"{fix}; sanity_check=false if it is meant")
        if trial.trains and isinstance(objective, LossObjective) and 3.2 < ratio < 5.0:
            happened = f"{getattr(objective.loss_fn, '__name__', type(objective.loss_fn).__name__)} gives the sum over the batch"
            expected = "the mean over its samples, as loss functions do: it is multiplied by their number"
            fix = "objective.reduction=mean; sanity_check=false if it is meant"
            raise ConfigError(key="objective", happened=happened, expected=expected, fix=fix)


def _growth_of_numbers(components: EvaluationComponents, trial: _Trial, world: World) -> Iterator[tuple[str, float, float, float]]:
    """Yield the numbers of an objective that are neither random, NaN nor 0: name, ratio, of some samples, of the same samples twice."""
    if trial.micro_batch.is_stand_in:
        return
    objective, model = components.objective, components.model.eval()  # no dropout
    numbers = []
    try:
        with batch_on(world.device, trial.micro_batch) as whole:
            tried = _some_samples_and_twice(trial, whole)
        for micro_batch in tried:
            with batch_on(world.device, micro_batch) as batch, torch.no_grad(), components.amp.autocast(world.device):
                values = {"loss": whole_loss(objective, model, batch)} if trial.trains else objective.score(model, batch)
            numbers.append({name: float(value.double().sum()) for name, value in values.items()})
    except Exception as error:
        logger.info("could not check whether loss and scores are sums: %s: %s", type(error).__name__, error)
        return
    for name in numbers[0]:
        once, again, twice = (values[name] for values in numbers)
        if all(map(math.isfinite, (once, again, twice))) and abs(once - again) <= _MAX_DEVIATION * abs(once) and again:
            yield name, twice / again, again, twice


def _some_samples_and_twice(trial: _Trial, batch: Batch) -> list[MicroBatch]:
    """Return half of a micro-batch, the same again, and that half twice over: of its rows, or read anew where rows are not samples."""
    size = batch_size(batch) if trial.micro_batch.num_samples is None else 0
    half = max(1, min(_MAX_SAMPLES, size // 2))

    def rows(tensor: Tensor, *, times: int) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] != size:
            raise ValueError("the batch's tensors do not share one leading dimension")
        return torch.cat([tensor[:half]] * times)

    try:
        return [MicroBatch(map_tensors(partial(rows, times=times), batch)) for times in (1, 1, 2)]
    except ValueError:
        if trial.ids is None or trial.source is None:
            raise
        some = trial.ids[: max(1, min(_MAX_SAMPLES, len(trial.ids) // 2))]
        return [as_micro_batch(trial.source.batch(np.tile(some, times)), len(some) * times) for times in (1, 1, 2)]


@dataclass
class _ForwardShapes:
    """Types and shapes of what the model took and gave in its first forward. "": it did not get there."""

    takes: str = ""
    gives: str = ""
    scores: list[torch.Size] = field(default_factory=list)  # the shapes of outputs that could be scores of classes

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
            then()

    with model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after):
        yield


def without_compiling() -> AbstractContextManager[Any]:
    """Run compiled models as they are written: other shapes would be compiled for nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
