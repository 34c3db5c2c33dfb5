"""Binary and multilabel classification: binary cross entropy, accuracy, F1, precision and recall; one yes or no a sample, or K labels.

Shapes: B samples, K labels. The batch's forms are those of supervised.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Goal
from ddp_train.objective.supervised import Supervised, count


class _BinaryCrossEntropy(Supervised):
    """The common part of both objectives.

    Args:
        positive_weight: how much a yes counts in the training loss, where a no counts 1; metrics are not weighted.
        aux_weight: of the model's auxiliary outputs (supervised.py).
    """

    _is_single: bool

    def __init__(self, *, positive_weight: float = 1.0, aux_weight: float | None = None) -> None:
        super().__init__(aux_weight=aux_weight)
        self.positive_weight = positive_weight

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted cross entropy in nats, the mean over a sample's labels, summed over the samples, shape []."""
        logits_BK, answers_BK = self._same_shape(outputs, targets)
        weight = None if self.positive_weight == 1 else logits_BK.new_full((), self.positive_weight)
        return F.binary_cross_entropy_with_logits(logits_BK, answers_BK, reduction="sum", pos_weight=weight) / logits_BK.shape[1]

    def measure(self, outputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums `loss` (unweighted, float64), `samples`, `exact` (samples with every answer right), and for each label
        `true_positive`, `false_positive`, `false_negative`; and per sample `target`, as in the batch, and `loss`, float32 [B].
        """
        logits_BK, answers_BK = self._same_shape(outputs, targets)
        losses_B = F.binary_cross_entropy_with_logits(logits_BK, answers_BK, reduction="none").mean(dim=1)
        says_BK, is_BK = logits_BK > 0, answers_BK > 0.5
        totals = {
            "loss": losses_B.sum(dtype=torch.float64),
            "samples": count(len(targets), targets),
            "exact": (says_BK == is_BK).all(dim=1).sum(),
            "true_positive": (says_BK & is_BK).sum(dim=0),
            "false_positive": (says_BK & ~is_BK).sum(dim=0),
            "false_negative": (~says_BK & is_BK).sum(dim=0),
        }
        return totals, {"target": targets, "loss": losses_B.float()}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction`, 0 or 1, int64, and `probability` of a yes, float32; [B] or [B, K]."""
        logits = outputs[:, 0] if self._is_single and outputs.ndim == 2 else outputs
        return {"prediction": (logits > 0).long(), "probability": logits.sigmoid().float()}

    def metric_inputs(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of a yes and the answers, int64; [B] or [B, K]."""
        logits_BK, answers_BK = self._same_shape(outputs, targets)
        probabilities_BK, answers_BK = logits_BK.sigmoid(), answers_BK.long()
        return (probabilities_BK[:, 0], answers_BK[:, 0]) if self._is_single else (probabilities_BK, answers_BK)

    def _same_shape(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and answers (0 or 1, as floats), both [B, K]."""
        is_single, is_multiple = outputs.numel() == targets.numel() == len(targets), outputs.shape == targets.shape and outputs.ndim == 2
        if not (is_single if self._is_single else is_multiple):
            wanted = "one logit a sample" if self._is_single else "both [B, K]"
            raise ValueError(f"the model gives {list(outputs.shape)} for answers of shape {list(targets.shape)}, not {wanted}")
        return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1).to(outputs.dtype)


class Binary(_BinaryCrossEntropy):
    """Minimise the binary cross entropy between a model's logits, shape [B] or [B, 1], and answers of 0 or 1, shape [B] or [B, 1]."""

    goals: Mapping[str, Goal] = {"accuracy": "max", "f1": "max", "precision": "max", "recall": "max", "loss": "min"}
    _is_single = True

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return `accuracy`, `f1`, `precision`, `recall` (of a yes, at probability 0.5; 0 without a hit) and `loss`."""
        hit, false_yes, false_no = (totals[name][0] for name in ("true_positive", "false_positive", "false_negative"))
        return {
            "accuracy": totals["exact"] / totals["samples"],
            "f1": _f1(hit, false_yes, false_no),
            "precision": hit / (hit + false_yes) if hit else 0.0,
            "recall": hit / (hit + false_no) if hit else 0.0,
            "loss": totals["loss"] / totals["samples"],
        }


class Multilabel(_BinaryCrossEntropy):
    """Minimise the mean binary cross entropy between a model's logits, shape [B, K], and answers of 0 or 1, shape [B, K]."""

    goals: Mapping[str, Goal] = {"f1": "max", "f1_macro": "max", "exact": "max", "loss": "min"}
    _is_single = False

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return `f1` (of all answers together), `f1_macro` (the mean over the labels; 0 for a label without a hit), `exact` and `loss`."""
        counts = [totals[name] for name in ("true_positive", "false_positive", "false_negative")]
        f1_by_label = [_f1(*of_label) for of_label in zip(*counts, strict=True)]
        return {
            "f1": _f1(*(sum(numbers) for numbers in counts)),
            "f1_macro": sum(f1_by_label) / len(f1_by_label),
            "exact": totals["exact"] / totals["samples"],
            "loss": totals["loss"] / totals["samples"],
        }


def _f1(hit: float, false_yes: float, false_no: float) -> float:
    return 2 * hit / (2 * hit + false_yes + false_no) if hit else 0.0
