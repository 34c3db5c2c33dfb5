"""The base of objectives that compare a model's output with targets: batches of any form, auxiliary outputs, metrics.

To change the loss, override `total_loss`; for another task, `measure` and `metrics` as well. `LossObjective` takes any loss function.

batch                          call
(inputs, targets)              model(inputs)
(a, b, targets)                model(a, b)
{"a": ..., "labels": ...}      model(a=...); the targets are called target, targets, label or labels

output                         main output           auxiliary outputs
a tensor                       the tensor
(logits, aux, ...)             the first             the rest
{"out": ..., "aux": ...}       `logits` or `out`     `aux`, `aux_logits`, `aux_loss`; so with transformers' ModelOutput
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import Batch, Goal, Scored
from ddp_train.interfaces.batch import batch_size, describe
from ddp_train.traits import ObjectiveConstants

TARGETS = ("target", "targets", "label", "labels")  # names of the targets in a batch that is a dict
IGNORE_NOTHING = -(2**31)
"""An index that no target has: torch's own default, -100, would drop targets of -100 from the loss, and `weight` would count them."""
_OUTPUTS = ("logits", "out")
_AUXILIARY = ("aux", "aux_logits", "aux_loss")


class ByCompare(ObjectiveConstants):
    """An objective whose samples all weigh the same, and that measures with one method: `compare`."""

    needs_labels = True

    compare: Callable[..., Scored]

    def weight(self, batch: Batch) -> int | Tensor:
        return batch_size(batch)

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self.compare(model, batch)[0]

    def predict(self, model: nn.Module, batch: Batch) -> Scored:
        return Scored(*self.compare(model, batch)[:2])


class CountsTargets(ByCompare):
    """An objective that weighs each target alike, and leaves out those that are `ignore_index`."""

    ignore_index: int | None  # None: every target counts, and `weight` needs no all-reduce

    def weight(self, batch: Batch) -> int | Tensor:
        """Return the number of targets that count: an int, or with `ignore_index` an int64 tensor of shape []."""
        targets: Tensor = split(batch)[1]
        return targets.numel() if self.ignore_index is None else (targets != self.ignore_index).sum()

    @property
    def _ignored(self) -> int:
        return IGNORE_NOTHING if self.ignore_index is None else self.ignore_index


class Supervised(ByCompare, ABC):
    """An objective over a model's outputs and the targets.

    Args:
        aux_weight: the share of the model's auxiliary outputs in the training loss: a tensor of shape [] is a loss by itself, the mean over
            the micro-batch; any other is compared with the targets as the output is (Inception, DeepLab). 0: they are left out. None: the
            model has none, and one that does is refused. They count in no metric.
    """

    goals: Mapping[str, Goal]

    def __init__(self, *, aux_weight: float | None = None) -> None:
        self.aux_weight = aux_weight

    # For subclasses to define, of the output and the targets of one batch.

    @abstractmethod
    def total_loss(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the loss for training, summed over the units that `weight` counts, shape []."""

    @abstractmethod
    def measure(self, outputs: Tensor, targets: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the totals of evaluation, each of shape [] or [K]; and values per sample that need the targets, name -> [B, ...]."""

    @abstractmethod
    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Turn the sums over the whole evaluation set into metrics."""

    @abstractmethod
    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the predictions for each sample, name -> [B, ...], without the targets."""

    def metric_inputs(self, outputs: Tensor, targets: Any) -> tuple[Tensor, Any]:
        """Return predictions and targets as metrics take them, one row for each sample."""
        return outputs, targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss summed over the batch's units, shape [], at least float32."""
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs, auxiliary = (model_outputs, []) if isinstance(model_outputs, Tensor) else unwrap(model_outputs)
        if outputs.ndim and len(outputs) != batch_size(batch):
            happened = f"the model gives {len(outputs)} outputs for the {batch_size(batch)} samples of the batch"
            expected = "one for each sample; a collate that drops or repeats samples says how many its batch has"
            fix = "return ddp_train.interfaces.Counted(batch, number) from it"
            raise ConfigError(key="loader.collate", happened=happened, expected=expected, fix=fix)
        total = self.total_loss(at_least_float32(outputs), targets)
        for aux, weight in weighed(auxiliary, self.aux_weight):
            aux_loss = aux.float() * self.weight(batch) if aux.ndim == 0 else self.total_loss(at_least_float32(aux), targets)
            total = total + weight * aux_loss
        return total

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        model_outputs, targets = outputs_and_targets(model, batch)
        return self.measure(at_least_float32(unwrap(model_outputs)[0]), targets)[0]

    def compare(self, model: nn.Module, batch: Batch) -> Scored:
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs = at_least_float32(unwrap(model_outputs)[0])
        totals, rows = self.measure(outputs, targets)
        return Scored(totals, {**self.predictions(outputs), **rows}, self.metric_inputs(outputs, targets))

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        """Return the predictions for inputs without targets: a tensor, a tuple or a dict of the model's arguments."""
        return self.predictions(at_least_float32(unwrap(call_model(model, inputs))[0]))


class LossObjective(nn.Module, ByCompare):
    """Adapt a third-party loss to the objective's protocol. Every sample weighs the same.

    A module, so that the parameters of a loss (learned centres, a temperature) are trained.

    Args:
        loss_fn: `loss_fn(outputs, targets)` returns the mean over the batch's samples, shape [] (`reduction="mean"`). A loss that divides
            by anything but B (class weights, ignored targets) is then not exactly independent of how the global batch is split. It gets the
            model's output: the logits of a dict (transformers' ModelOutput), a tuple as it is.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.goals: Mapping[str, Goal] = {"loss": "min"}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss times the number of samples, shape []; a loss function that gives another shape is a ValueError."""
        return self._loss(model, batch)[0]

    def compare(self, model: nn.Module, batch: Batch) -> Scored:
        """Return the sums `loss` (float64) and `samples`, the model's `output` for each sample, and it with the targets for metrics."""
        loss, outputs = self._loss(model, batch)
        totals = {"loss": loss.double(), "samples": count(batch_size(batch), loss)}
        return Scored(totals, {"output": outputs}, (outputs, split(batch)[1]))

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        return {"output": _bare(call_model(model, inputs))}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        return {"loss": totals["loss"] / totals["samples"]}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs = _bare(model_outputs)
        mean = self.loss_fn(outputs, targets)
        if mean.ndim != 0:
            raise ValueError(f"a loss function must return one number, the batch's mean (reduction='mean'); got shape {list(mean.shape)}")
        return mean * batch_size(batch), outputs


def _bare(outputs: Any) -> Any:
    return unwrap(outputs)[0] if isinstance(outputs, Mapping) else outputs


def weighed(auxiliary: list[Tensor], aux_weight: float | None) -> list[tuple[Tensor, float]]:
    """Return a model's auxiliary outputs, each with its weight in the loss."""
    if auxiliary and aux_weight is None:
        happened = f"is null, and the model returns {len(auxiliary)} auxiliary outputs, the first of shape {[*auxiliary[0].shape]}"
        expected = "the weight of an auxiliary loss (shape []) or further outputs in the training loss; 0: none"
        raise ConfigError(key="objective.aux_weight", happened=happened, expected=expected, fix="+objective.aux_weight=0.4, or 0")
    return [(aux, aux_weight) for aux in auxiliary] if aux_weight else []


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert half precision to float32: sums of exponentials, or over many samples, would lose too much."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def count(number: int, like: Tensor) -> Tensor:
    """Return a number as int64 on a tensor's device, without waiting for it: torch.tensor() copies from the host."""
    return torch.full((), number, dtype=torch.int64, device=like.device)


def outputs_and_targets(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """Return the model's outputs for the batch's inputs, and the batch's targets."""
    inputs, targets = split(batch)
    return call_model(model, inputs), targets


def split(batch: Batch) -> tuple[Any, Any]:
    """Return the inputs of a batch, a tuple or a dict of the model's arguments, and its targets."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) != 1:
            happened = f"is null, and {len(names)} of a batch's keys ({', '.join(map(str, batch))}) are called {', '.join(TARGETS)}"
            expected = "one key with the targets; or the keys to train on, the targets last"
            raise conflict("loader.fields", happened, "[INPUT,TARGET]", expected=expected)
        return {name: value for name, value in batch.items() if name != names[0]}, batch[names[0]]
    expected = "(inputs, targets), with several inputs (a, b, targets), or a dict"
    fix = "an objective of your own for other batches (ddp_train.interfaces.Objective)"
    raise ConfigError(key="data", happened=f"a batch is {describe(batch)}", expected=expected, fix=fix)


def call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def unwrap(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Return a model's main output and its auxiliary outputs. Raises TypeError: no main output is known."""
    if isinstance(outputs, Tensor):
        return outputs, []
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0], [extra for extra in outputs[1:] if isinstance(extra, Tensor)]
    named = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    for name in _OUTPUTS:
        if isinstance(output := named.get(name), Tensor):
            return output, [named[extra] for extra in _AUXILIARY if isinstance(named.get(extra), Tensor)]
    raise TypeError(f"a model gives a tensor, a tuple that begins with it, or a dict with {' or '.join(_OUTPUTS)}; not {describe(outputs)}")
