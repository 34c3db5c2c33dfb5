"""Classification into K classes: cross entropy, accuracy and top-5 accuracy.

Shapes: B samples, K classes. A batch is `(inputs, labels)`, labels int64 in [0, K), shape [B].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import Batch, Goal, batch_size


class Classification:
    """Minimise the cross entropy between a model's logits, shape [B, K], and the labels. Every sample weighs the same.

    Args:
        label_smoothing: share of the target spread evenly over all K classes, in [0, 1]; training only, metrics are not smoothed.

    Source: Szegedy et al. 2015, arXiv:1512.00567, section 7 (label smoothing).
    """

    goals: Mapping[str, Goal] = {"accuracy": "max", "accuracy_top5": "max", "loss": "min"}

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def weight(self, batch: Batch) -> int:
        """Return the number of samples."""
        return batch_size(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the smoothed cross entropy in nats, summed over the samples, shape [], at least float32."""
        inputs, labels_B = batch
        logits_BK = _at_least_float32(model(inputs))
        return F.cross_entropy(logits_BK, labels_B, reduction="sum", label_smoothing=self.label_smoothing)

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` (unsmoothed, float64) and the counts `samples`, `correct` and, where K > 5, `correct_top5`; each of shape []."""
        totals, _, _ = self._score(model, batch)
        return totals

    def predict(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what `score` returns, and for each sample `prediction` (the likeliest class) and `target`, int64 [B], with `probability`
        (that the model gives to its prediction) and `loss` (unsmoothed), float32 [B].
        """
        totals, logits_BK, losses_B = self._score(model, batch)
        prediction_B = logits_BK.argmax(dim=1)  # as `correct` has it: the softmax may round two classes to the same probability
        probability_B = logits_BK.softmax(dim=1).gather(1, prediction_B[:, None])[:, 0]
        _, labels_B = batch
        return totals, {"prediction": prediction_B, "target": labels_B, "probability": probability_B.float(), "loss": losses_B.float()}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return `accuracy`, `accuracy_top5` (where K > 5) and `loss`: means over all samples."""
        metrics = {"accuracy": totals["correct"] / totals["samples"]}
        if "correct_top5" in totals:
            metrics["accuracy_top5"] = totals["correct_top5"] / totals["samples"]
        return metrics | {"loss": totals["loss"] / totals["samples"]}

    def _score(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        inputs, labels_B = batch
        logits_BK = _at_least_float32(model(inputs))
        losses_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
        totals = {
            "loss": losses_B.sum(dtype=torch.float64),
            # full(), not tensor(): that one copies from the host and waits.
            "samples": torch.full((), len(labels_B), dtype=torch.int64, device=labels_B.device),
            "correct": (logits_BK.argmax(dim=1) == labels_B).sum(),
        }
        if logits_BK.shape[1] > 5:
            totals["correct_top5"] = (logits_BK.topk(5, dim=1).indices == labels_B[:, None]).sum()
        return totals, logits_BK, losses_B


def _at_least_float32(logits: Tensor) -> Tensor:
    """Leave half precision: a sum of exponentials loses what training needs."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
