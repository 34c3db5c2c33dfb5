"""Try one training batch and one batch of each evaluation set on the bare model, before the first step.

So a mismatch of data, model and objective costs seconds, and not the first epoch; it ends the run on one screen that names the config keys,
shapes and types. A rank that finds a fault ends like one that fails in training: nothing here is collective. Random streams, buffers, modes
and the data's position are put back, so that a run computes the same with and without (docs/decisions/0019-sanity-check.md).

A loss or a value that is no mean over samples is found, too (`sample_means.py`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DistError

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, UserError, one_line
from ddp_train.interfaces import Objective, Value
from ddp_train.interfaces.batch import batch_size, describe, tensors_of
from ddp_train.interfaces.objective import loss_sum, value_sums
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch
from ddp_train.objective.supervised import LossObjective
from ddp_train.system.stack_dump import user_line
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.check.rehearsal import restoring_state
from ddp_train.training.check.sample_means import Trial, refuse_dependent
from ddp_train.training.parts import metric
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.traits import ObjectiveConstants, constants_of

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 160  # of the description of a batch or an output: a dict may have many tensors


def try_first_batches(components: Components, first: MicroBatch, world: World, position: int) -> None:
    """Try the first micro-batch of training and the first of each evaluation set; rank 0 prints a line for each.

    `position`: the data's. Raises ConfigError: data, model and objective do not fit.
    DataError: a label is out of range.
    """
    lines = []
    with restoring_state(components, world.device), without_compiling():  # hooks on a forward would be compiled into it
        for trial in _trials(components, first, position):
            lines.append(_try(components, trial, world))
            refuse_dependent(components, trial, world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # steps need blocks of other sizes
    world.print(*(f"tried    {line}" for line in lines))


def _trials(components: Components, first: MicroBatch, position: int) -> Iterator[Trial]:
    loader = components.train_loader
    yield Trial("the first training batch", True, first, loader.sample_ids(position, 0), loader.source)
    for set_name, eval_loader in components.eval_loaders.items():
        if (evaluated := eval_loader.peek()) is not None:
            name = f"the first batch of evaluation set {set_name}" if set_name else "the first evaluation batch"
            yield Trial(name, False, evaluated, eval_loader.sample_ids(0), eval_loader.source)


def try_training(components: Components, micro_batch: MicroBatch, world: World) -> None:
    """Try a micro-batch of training alone, and print nothing; raises as `try_first_batches` does."""
    with restoring_state(components, world.device), without_compiling():
        _try(components, Trial("the first training batch", True, micro_batch), world)


def _try(components: EvaluationComponents, trial: Trial, world: World) -> str:
    """Run one batch as training or evaluation does, and return its line for the screen. No backward: that of the first step comes soon."""
    model, objective, micro_batch, forward = components.model, components.objective, trial.micro_batch, _ForwardShapes()
    model.train(trial.trains)
    loss_text = ""
    try:
        recording = _recording(model, forward, lambda: _refuse_labels(objective, forward, trial))
        with batch_on(world.device, micro_batch) as batch, components.amp.autocast(world.device), recording:
            if trial.trains:
                loss = loss_sum(objective, model, batch)
                _require_device("loss", loss.total, world)
                if not loss.total.requires_grad:
                    raise TypeError("loss does not depend on the parameters: is there a detach(), argmax or no_grad on its way?")
                if forward.is_finite and loss.total.isnan():
                    raise ValueError("loss is NaN, and the model's output is finite: mask with where, as 0 * NaN is NaN")
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


def _mismatch_error(error: Exception, components: EvaluationComponents, trial: Trial, forward: _ForwardShapes) -> ConfigError:
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


def _refuse_labels(objective: Objective, forward: _ForwardShapes, trial: Trial) -> None:
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
