"""Regression: squared, absolute or Huber loss; RMSE, MAE and R2.

Shapes: B samples, D predicted numbers for each. Targets are floats, shape [B] or [B, D]; the batch's forms are those of supervised.py.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Goal
from ddp_train.objective.supervised import Supervised, count


class Regression(Supervised):
    """Minimise the distance between a model's output, shape [B], [B, 1] or [B, D], and the targets. Every sample weighs the same.

    Args:
        criterion: "mse" (squared), "mae" (absolute) or "huber" (squared below `huber_delta`, absolute above).
        huber_delta: in units of the target.
        aux_weight: of the model's auxiliary outputs (supervised.py).
    """

    goals: Mapping[str, Goal] = {"rmse": "min", "mae": "min", "r2": "max", "loss": "min"}

    def __init__(
        self, *, criterion: Literal["mse", "mae", "huber"] = "mse", huber_delta: float = 1.0, aux_weight: float | None = None
    ) -> None:
        super().__init__(aux_weight=aux_weight)
        self.criterion, self.huber_delta = criterion, huber_delta

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, the mean over a sample's D numbers, summed over the samples, shape []."""
        return self._losses(*_same_shape(outputs, targets)).mean(dim=1).sum()

    def measure(self, outputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums `loss`, `absolute`, and for each of the D numbers `squared`, `target`, `target_squared` (float64), and `samples`;
        and per sample `target`, as in the batch, and `loss`, float32 [B].
        """
        outputs_BD, targets_BD = _same_shape(outputs, targets)
        losses_B = self._losses(outputs_BD, targets_BD).mean(dim=1)
        outputs_BD, targets_BD = outputs_BD.double(), targets_BD.double()
        errors_BD = outputs_BD - targets_BD
        totals = {
            "loss": losses_B.sum(dtype=torch.float64),
            "absolute": errors_BD.abs().mean(dim=1).sum(),
            "squared": errors_BD.square().sum(dim=0),
            "target": targets_BD.sum(dim=0),
            "target_squared": targets_BD.square().sum(dim=0),
            "samples": count(len(targets), targets),
        }
        return totals, {"target": targets, "loss": losses_B.float()}

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return `rmse`, `mae`, `r2` (the mean over the D numbers; if all targets are equal: 1 for exact predictions, else 0), `loss`."""
        samples, squared = totals["samples"], totals["squared"]
        r2 = [
            1 - error / spread if (spread := square - total**2 / samples) > 1e-12 * square else float(error == 0)
            for error, total, square in zip(squared, totals["target"], totals["target_squared"], strict=True)
        ]
        return {
            "rmse": math.sqrt(sum(squared) / len(squared) / samples),
            "mae": totals["absolute"] / samples,
            "r2": sum(r2) / len(r2),
            "loss": totals["loss"] / samples,
        }

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": _flat(outputs)}

    def metric_inputs(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and targets, both [B] or both [B, D]."""
        return _flat(outputs), _flat(targets)

    def _losses(self, outputs_BD: Tensor, targets_BD: Tensor) -> Tensor:
        if self.criterion == "huber":
            return F.huber_loss(outputs_BD, targets_BD, reduction="none", delta=self.huber_delta)
        return {"mse": F.mse_loss, "mae": F.l1_loss}[self.criterion](outputs_BD, targets_BD, reduction="none")


def _same_shape(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as [B, D]: torch would make [B, 1] - [B] a [B, B] without an error."""
    sizes = outputs.shape[1:].numel(), targets.shape[1:].numel()
    if len(outputs) != len(targets) or sizes[0] != sizes[1]:
        raise ValueError(f"the model gives {list(outputs.shape)} for targets of shape {list(targets.shape)}")
    return outputs.flatten(1) if outputs.ndim > 1 else outputs[:, None], targets.reshape(len(targets), -1).to(outputs.dtype)


def _flat(values: Tensor) -> Tensor:
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
