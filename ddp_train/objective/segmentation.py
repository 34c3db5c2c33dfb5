"""Segmentation: a class for every pixel; mean intersection over union and pixel accuracy.

Shapes: B samples, K classes, H height, W width. Targets are int64 in [0, K), shape [B, H, W]; the batch's forms are those of supervised.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Goal
from ddp_train.objective.supervised import CountsTargets, Supervised, count


class Segmentation(Supervised, CountsTargets):
    """Minimise the cross entropy between a model's logits, shape [B, K, h, w], and the classes of the pixels. Every pixel weighs the same.

    Logits of another size than the targets are resized to theirs: many models compute at a quarter of it.

    Args:
        ignore_index: target that counts nowhere (borders); None: every pixel counts, and `weight` needs no all-reduce.
        aux_weight: of the model's auxiliary outputs (supervised.py).
    """

    goals: Mapping[str, Goal] = {"mean_iou": "max", "accuracy": "max", "loss": "min"}

    def __init__(self, *, ignore_index: int | None = None, aux_weight: float | None = None) -> None:
        super().__init__(aux_weight=aux_weight)
        self.ignore_index = ignore_index

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy in nats, summed over the pixels that count, shape []."""
        return _cross_entropy(_resized(outputs, targets), targets, reduction="sum", ignore_index=self._ignored)

    def measure(self, outputs: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums `loss`, `pixels`, `samples`, by class `intersection`, `predicted`, `labels`; per sample `target` and `loss`."""
        logits_BKHW = _resized(outputs, targets)
        num_classes = logits_BKHW.shape[1]
        losses_BHW = _cross_entropy(logits_BKHW, targets, reduction="none", ignore_index=self._ignored).view_as(targets)
        counts_BHW = targets != self._ignored
        predicted, labels = logits_BKHW.argmax(dim=1).flatten(), targets.flatten()
        is_counted, rest = counts_BHW.flatten(), num_classes  # one more class for ignored pixels: the host would wait for a mask's size
        predicted, labels = torch.where(is_counted, predicted, rest), torch.where(is_counted, labels, rest)
        totals = {
            "loss": losses_BHW.sum(dtype=torch.float64),
            "pixels": counts_BHW.sum(),
            "intersection": _histogram(torch.where(predicted == labels, labels, rest), num_classes),
            "predicted": _histogram(predicted, num_classes),
            "labels": _histogram(labels, num_classes),
            "samples": count(len(targets), targets),
        }
        return totals, {"target": targets, "loss": losses_BHW.flatten(1).sum(dim=1).float()}

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return `mean_iou` (over the classes in labels or predictions), `accuracy` and `loss` (means over all pixels)."""
        counts = zip(totals["predicted"], totals["labels"], totals["intersection"], strict=True)
        ious = [both / (predicted + labels - both) for predicted, labels, both in counts if predicted + labels]
        pixels = totals["pixels"] or 1
        return {
            "mean_iou": sum(ious) / len(ious) if ious else 0.0,
            "accuracy": sum(totals["intersection"]) / pixels,
            "loss": totals["loss"] / pixels,
        }

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction`, the likeliest class of each pixel at the size of the model's output, int64 [B, h, w]."""
        return {"prediction": outputs.argmax(dim=1)}

    def metric_inputs(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest classes and the targets, both [B, H, W]; with `ignore_index`, an argument of torchmetrics too."""
        return _resized(outputs, targets).argmax(dim=1), targets


def _resized(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[2:] == targets.shape[1:]:
        return logits
    return F.interpolate(logits, size=targets.shape[1:], mode="bilinear", align_corners=False)


def _histogram(classes: Tensor, num_classes: int) -> Tensor:
    """Count each class, shape [K]; values of K are left out. bincount would make the host wait for a GPU."""
    return classes.new_zeros(num_classes + 1).scatter_add_(0, classes, torch.ones_like(classes))[:num_classes]


def _cross_entropy(logits_BKHW: Tensor, targets_BHW: Tensor, **options: Any) -> Tensor:
    """Return torch's cross entropy; pixels are flattened for deterministic algorithms: CUDA has no such kernel for [B, K, H, W]."""
    if torch.are_deterministic_algorithms_enabled():
        logits_BKHW, targets_BHW = logits_BKHW.movedim(1, -1).flatten(0, -2), targets_BHW.flatten()
    return F.cross_entropy(logits_BKHW, targets_BHW, **options)
