"""Regression: squared, absolute or Huber loss; RMSE, MAE and R2.

Shapes: B samples, D predicted numbers for each. Targets are floats, shape [B] or [B, D]; the batch's forms are those of supervised.py.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Evaluated, Goal, Ratio, Value
from ddp_train.objective.supervised import Supervised


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
        self.distance, self.huber_delta = criterion, huber_delta

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, the mean over its D numbers, shape [B]."""
        outputs_BD, targets_BD = _same_shape(outputs, targets)
        if self.distance == "huber":
            losses_BD = F.huber_loss(outputs_BD, targets_BD, reduction="none", delta=self.huber_delta)
        else:
            losses_BD = {"mse": F.mse_loss, "mae": F.l1_loss}[self.distance](outputs_BD, targets_BD, reduction="none")
        return losses_BD.mean(dim=1)

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `loss` and `mae` of each sample, and for each of the D numbers the means that `metrics` needs."""
        outputs_BD, targets_BD = (values.double() for values in _same_shape(outputs, targets))
        errors_BD = outputs_BD - targets_BD
        by_number = {"squared": errors_BD.square(), "target_mean": targets_BD, "target_squared": targets_BD.square()}
        columns = {name: Ratio(numbers_BD, len(targets), by_column=True) for name, numbers_BD in by_number.items()}
        values: dict[str, Value] = {"loss": self.criterion(outputs, targets), "mae": errors_BD.abs().mean(dim=1)}
        return Evaluated(values | columns, compared=(_flat(outputs), _flat(targets)))

    def metrics(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `rmse`, `mae`, `r2` (the mean over the D numbers; if all targets are equal: 1 for exact predictions, else 0), `loss`."""
        squared = means["squared"]
        r2 = [
            1 - error / spread if (spread := square - mean**2) > 1e-12 * square else float(error == 0)
            for error, mean, square in zip(squared, means["target_mean"], means["target_squared"], strict=True)
        ]
        rmse = math.sqrt(sum(squared) / len(squared))
        return {"rmse": rmse, "mae": means["mae"], "r2": sum(r2) / len(r2), "loss": means["loss"]}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"prediction": _flat(outputs)}


def _same_shape(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as [B, D]: torch would make [B, 1] - [B] a [B, B] without an error."""
    sizes = outputs.shape[1:].numel(), targets.shape[1:].numel()
    if len(outputs) != len(targets) or sizes[0] != sizes[1]:
        raise ValueError(f"the model gives {list(outputs.shape)} for targets of shape {list(targets.shape)}")
    return outputs.flatten(1) if outputs.ndim > 1 else outputs[:, None], targets.reshape(len(targets), -1).to(outputs.dtype)


def _flat(values: Tensor) -> Tensor:
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
