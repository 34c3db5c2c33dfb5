"""Use any loss function as an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ddp_train.interfaces import Batch, Goal, Objective, batch_size
from ddp_train.objective.supervised import ByCompare, call_model, count, outputs_and_targets, split, unwrap


class LossObjective(nn.Module, ByCompare):
    """Adapt a third-party loss to the objective's protocol. Every sample weighs the same; the batch's forms are those of supervised.py.

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
        loss, _ = self._loss(model, batch)
        return loss

    def compare(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Any, Any]]:
        """Return the sums `loss` (float64) and `samples`, the model's `output` for each sample, and it with the targets for metrics."""
        loss, outputs = self._loss(model, batch)
        totals = {"loss": loss.double(), "samples": count(batch_size(batch), loss)}
        return totals, {"output": outputs}, (outputs, split(batch)[1])

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


def as_objective(candidate: object) -> Objective:
    """Return an objective with the whole protocol unchanged, and a bare loss function inside a `LossObjective`."""
    # `weight` alone says nothing: nn.CrossEntropyLoss has one too, its class weights.
    if hasattr(candidate, "loss") or hasattr(candidate, "score"):
        missing = [name for name in ("goals", "weight", "loss", "score", "metrics") if not hasattr(candidate, name)]
        if missing:
            raise TypeError(f"the objective {type(candidate).__name__} lacks {', '.join(missing)} (ddp_train.interfaces.Objective)")
        return candidate  # type: ignore[return-value]
    if callable(candidate) and not isinstance(candidate, type):
        return LossObjective(candidate)
    kind = f"the class {candidate.__name__}, not an instance" if isinstance(candidate, type) else f"a {type(candidate).__name__}"
    raise TypeError(f"an objective has `score` and `loss` (ddp_train/interfaces) or is a function loss_fn(outputs, targets); got {kind}")
