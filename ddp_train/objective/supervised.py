"""The base of objectives that compare a model's output with targets: batches of any form, auxiliary outputs.

To change the loss, override `criterion`; for another task, `measure` and `goals` as well.
`LossObjective` takes any loss function, `StepObjective` any step.

batch                          call
(inputs, targets)              model(inputs)
(a, b, targets)                model(a, b)
{"a": ..., "labels": ...}      model(a=...); the targets are called target, targets, label or labels

output                         main output           auxiliary outputs
a tensor                       the tensor
(logits, aux, ...)             the first             the rest
{"out": ..., "aux": ...}       `logits` or `out`     `aux`, `aux_logits`, `aux_loss`; so with transformers' ModelOutput
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ddp_train.errors import ConfigError, conflict
from ddp_train.interfaces import Batch, Evaluated, Objective, Ratio, Value
from ddp_train.interfaces.batch import batch_size, call_model, describe
from ddp_train.interfaces.objective import HALF, TARGETS
from ddp_train.model_log import log
from ddp_train.traits import function_of

IGNORE_NOTHING = -(2**31)  # an index that no target has: torch's own default, -100, would drop targets of -100
_OUTPUTS = ("logits", "out")
_AUXILIARY = ("aux", "aux_logits", "aux_loss")


class Supervised(Objective):
    """An objective over a model's outputs and the targets.

    Args:
        aux_weight: the share of the model's auxiliary outputs in the training loss: a tensor of shape [] is a loss by itself, the mean over
            the micro-batch; any other is compared with the targets as the output is (Inception, DeepLab). 0: they are left out. None: the
            model has none, and one that does is refused. They count in no metric.
    """

    needs_labels = True

    def __init__(self, *, aux_weight: float | None = None) -> None:
        self.aux_weight = aux_weight

    # For subclasses to define, of the output and the targets of one batch.

    @abstractmethod
    def criterion(self, outputs: Tensor, targets: Any) -> Value:
        """Return the loss for training, as `Objective.loss` does."""

    @abstractmethod
    def measure(self, outputs: Tensor, targets: Any) -> Evaluated:
        """Return what is reported, what is saved for each sample besides the predictions, and what `evaluation.metrics` compares."""

    def training_loss(self, outputs: Tensor, targets: Any, batch: Batch) -> Value:
        """Return the loss of the main output, for an objective that needs more of the batch than the targets."""
        return self.criterion(outputs, targets)

    def predictions(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """Return the predictions for each sample, name -> [B, ...], without the targets."""
        return {"output": outputs}

    def loss(self, model: nn.Module, batch: Batch) -> Value:
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs, auxiliary = (model_outputs, []) if isinstance(model_outputs, Tensor) else unwrap(model_outputs)
        if outputs.ndim and len(outputs) != batch_size(batch):
            happened = f"the model gives {len(outputs)} outputs for the {batch_size(batch)} samples of the batch"
            expected = "one for each sample; a collate that drops or repeats samples says how many its batch has"
            fix = "return ddp_train.interfaces.Counted(batch, number) from it"
            raise ConfigError(key="loader.collate", happened=happened, expected=expected, fix=fix)
        total = self.training_loss(at_least_float32(outputs), targets, batch)
        for aux, weight in weighed(auxiliary, self.aux_weight):
            total = with_aux(total, aux.float() if aux.ndim == 0 else self.criterion(at_least_float32(aux), targets), weight)
        return total

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs = at_least_float32(unwrap(model_outputs)[0])
        measured = self.measure(outputs, targets)
        return measured._replace(rows={**self.predictions(outputs), "target": targets, **measured.rows})

    def infer(self, model: nn.Module, inputs: Any) -> Mapping[str, Tensor]:
        return self.predictions(at_least_float32(unwrap(call_model(model, inputs))[0]))


class LossObjective(nn.Module, Objective):
    """Adapt a loss function. Every sample weighs the same.

    A module, so that the parameters of a loss (learned centres, a temperature) are trained.

    Args:
        loss_fn: `loss_fn(outputs, targets)` returns the mean over the batch's samples, shape [], or the loss of each sample, shape [B]. It
            gets the model's output: the logits of a dict (transformers' ModelOutput), a tuple as it is.
    """

    needs_labels = True

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Return the `loss`, the model's `output` for each sample, and it with the targets for metrics."""
        loss, outputs = self._loss(model, batch)
        return Evaluated({"loss": loss}, {"output": outputs}, (outputs, split(batch)[1]))

    def infer(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        return {"output": _bare(call_model(model, inputs))}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        model_outputs, targets = outputs_and_targets(model, batch)
        outputs = _bare(model_outputs)
        return self.loss_fn(outputs, targets), outputs


class StepObjective(Objective):
    """Adapt a function `step(model, batch)`: it returns the loss, or values by name, `loss` among them, each as `Objective.loss` does.

    Of the others training logs the means over the micro-batches, and no `Ratio`. An evaluation reports all. `step.goals` may say which way
    they are better.
    """

    def __init__(self, step: Callable[[nn.Module, Batch], Any]) -> None:
        self._step = step
        self.goals = getattr(function_of(step), "goals", self.goals)

    def loss(self, model: nn.Module, batch: Batch) -> Value:
        values = self.evaluate(model, batch)
        for name, value in values.items():
            if name != "loss" and isinstance(value, Tensor):
                log(name, value.float().mean())
        return values["loss"]

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Value]:
        result = self._step(model, batch)
        values: Mapping[str, Value] = result if isinstance(result, Mapping) else {"loss": result}
        if "loss" not in values:
            raise TypeError(f"the step gives {describe(values)}, and no loss")
        return values


def _bare(outputs: Any) -> Any:
    return unwrap(outputs)[0] if isinstance(outputs, Mapping) else outputs


def with_aux(loss: Value, aux: Value, weight: float) -> Value:
    """Return a loss with a share of another one: of the same form, or a mean of shape []."""
    if not isinstance(loss, Ratio):
        assert isinstance(aux, Tensor)
        return loss + weight * aux
    if isinstance(aux, Ratio):
        return loss._replace(numerator=loss.numerator.sum() + weight * aux.numerator.sum())
    units = loss.denominator
    return loss._replace(numerator=loss.numerator.sum() + weight * aux * (units.sum() if isinstance(units, Tensor) else units))


def weighed(auxiliary: list[Tensor], aux_weight: float | None) -> list[tuple[Tensor, float]]:
    """Return a model's auxiliary outputs, each with its weight in the loss."""
    if auxiliary and aux_weight is None:
        happened = f"is null, and the model returns {len(auxiliary)} auxiliary outputs, the first of shape {[*auxiliary[0].shape]}"
        expected = "the weight of an auxiliary loss (shape []) or further outputs in the training loss; 0: none"
        raise ConfigError(key="objective.aux_weight", happened=happened, expected=expected, fix="+objective.aux_weight=0.4, or 0")
    return [(aux, aux_weight) for aux in auxiliary] if aux_weight else []


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert half precision to float32: sums of exponentials, or over many samples, would lose too much."""
    return outputs.float() if outputs.dtype in HALF else outputs


def per_target(losses: Tensor, targets: Tensor, ignore_index: int | None) -> Ratio:
    """Return the mean over the targets that count, of losses that are 0 where one does not; with None all of them count."""
    return Ratio(losses, targets.numel() if ignore_index is None else targets != ignore_index)


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
    fix = "an objective of your own for other batches (ddp_train.Objective)"
    raise ConfigError(key="data", happened=f"a batch is {describe(batch)}", expected=expected, fix=fix)


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
