"""Binary and multilabel classification: binary cross entropy, accuracy, F1, precision and recall; one yes or no a sample, or K labels.

Shapes: B samples, K labels. The batch's forms are those of supervised.py.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Evaluated, Goal, Ratio, Value
from ddp_train.objective.supervised import Supervised


class Multilabel(Supervised):
    """Minimise the mean binary cross entropy between a model's logits, shape [B, K], and answers of 0 or 1, shape [B, K].

    Args:
        positive_weight: how much a yes counts in the training loss, where a no counts 1; metrics are not weighted.
        aux_weight: of the model's auxiliary outputs (supervised.py).
    """

    goals: Mapping[str, Goal] = {"f1": "max", "exact": "max", "loss": "min"}

    def __init__(self, *, positive_weight: float = 1.0, aux_weight: float | None = None) -> None:
        super().__init__(aux_weight=aux_weight)
        self.positive_weight = positive_weight

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted cross entropy in nats, the mean over samples and labels, shape []."""
        logits_BK, answers_BK = self._as_columns(outputs, targets)
        weight = None if self.positive_weight == 1 else logits_BK.new_full((), self.positive_weight)
        return F.binary_cross_entropy_with_logits(logits_BK, answers_BK, pos_weight=weight)

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `loss` (unweighted) and `exact` (every answer right) of each sample; `precision`, `recall`, `f1` of all answers together,
        of a yes at probability 0.5.
        """
        logits_BK, answers_BK = self._as_columns(outputs, targets)
        says_BK, is_BK = logits_BK > 0, answers_BK > 0.5
        hits_BK = says_BK & is_BK
        values: dict[str, Value] = {
            "exact": (says_BK == is_BK).all(dim=1),
            "f1": Ratio(2 * hits_BK, says_BK.long() + is_BK),
            "precision": Ratio(hits_BK, says_BK),
            "recall": Ratio(hits_BK, is_BK),
            "loss": F.binary_cross_entropy_with_logits(logits_BK, answers_BK, reduction="none").mean(dim=1),
        }
        return Evaluated(values, compared=(logits_BK.sigmoid(), answers_BK.long()))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction`, 0 or 1, int64, and `probability` of a yes, float32; shaped as the outputs."""
        return {"prediction": (outputs > 0).long(), "probability": outputs.sigmoid().float()}

    def _as_columns(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and answers (0 or 1, as floats), both [B, K]."""
        if outputs.shape != targets.shape or outputs.ndim != 2:
            raise ValueError(f"the model gives {list(outputs.shape)} for answers of shape {list(targets.shape)}, not both [B, K]")
        return outputs, targets.to(outputs.dtype)


class Binary(Multilabel):
    """Minimise the binary cross entropy between a model's logits, shape [B] or [B, 1], and answers of 0 or 1, shape [B] or [B, 1]."""

    goals: Mapping[str, Goal] = {"accuracy": "max", "f1": "max", "precision": "max", "recall": "max", "loss": "min"}

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `accuracy` and `loss` of each sample; `precision`, `recall` and `f1` of a yes at probability 0.5."""
        values, rows, compared = super().measure(outputs, targets)
        named = {("accuracy" if name == "exact" else name): value for name, value in values.items()}
        assert compared is not None
        return Evaluated(named, rows, (compared[0][:, 0], compared[1][:, 0]))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        return super().predictions(outputs.flatten())

    def _as_columns(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not outputs.numel() == targets.numel() == len(targets):
            raise ValueError(f"the model gives {list(outputs.shape)} for answers of shape {list(targets.shape)}, not one logit a sample")
        return outputs.reshape(-1, 1), targets.reshape(-1, 1).to(outputs.dtype)
