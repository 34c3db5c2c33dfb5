"""Segmentation: a class for every pixel; mean intersection over union and pixel accuracy.

Shapes: B samples, K classes, H height, W width. Targets are int64 in [0, K), shape [B, H, W]; the batch's forms are those of supervised.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Evaluated, Goal, Ratio
from ddp_train.objective.supervised import IGNORE_NOTHING, Supervised, per_target


class Segmentation(Supervised):
    """Minimise the cross entropy between a model's logits, shape [B, K, h, w], and the classes of the pixels. Every pixel weighs the same.

    Logits of another size than the targets are resized to theirs: many models compute at a quarter of it.

    Args:
        ignore_index: target that counts nowhere (borders); None: every pixel counts, which spares one small all-reduce a step.
        aux_weight: of the model's auxiliary outputs (supervised.py).
    """

    goals: Mapping[str, Goal] = {"mean_iou": "max", "accuracy": "max", "loss": "min"}

    def __init__(self, *, ignore_index: int | None = None, aux_weight: float | None = None) -> None:
        super().__init__(aux_weight=aux_weight)
        self.ignore_index = ignore_index
        self._ignored = IGNORE_NOTHING if ignore_index is None else ignore_index

    def criterion(self, outputs: Tensor, targets: Tensor) -> Ratio:
        """Return the cross entropy in nats over the pixels that count."""
        total = _cross_entropy(_resized(outputs, targets), targets, reduction="sum", ignore_index=self._ignored)
        return per_target(total, targets, self.ignore_index)

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `loss` and `accuracy` over the pixels that count, `iou` of each class; the `loss` of each sample, over its pixels."""
        logits_BKHW = _resized(outputs, targets)
        num_classes = logits_BKHW.shape[1]
        losses_BHW = _cross_entropy(logits_BKHW, targets, reduction="none", ignore_index=self._ignored).view_as(targets)
        is_counted_BHW, predicted_BHW = targets != self._ignored, logits_BKHW.argmax(dim=1)
        rest = num_classes  # one more class for ignored pixels: the host would wait for a mask's size
        predicted, labels = (torch.where(is_counted_BHW, classes, rest).flatten(1) for classes in (predicted_BHW, targets))
        both_BK = _histograms(torch.where(predicted == labels, labels, rest), num_classes)
        either_BK = _histograms(predicted, num_classes) + _histograms(labels, num_classes) - both_BK
        values = {
            "loss": Ratio(losses_BHW, is_counted_BHW),
            "accuracy": Ratio(both_BK, is_counted_BHW),
            "iou": Ratio(both_BK, either_BK, by_column=True),
        }
        return Evaluated(values, {"loss": losses_BHW.flatten(1).sum(dim=1).float()}, (predicted_BHW, targets))

    def metrics(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `mean_iou` (over the classes in labels or predictions), `accuracy` and `loss` (means over all pixels)."""
        ious = [iou for iou in means["iou"] if not math.isnan(iou)]
        return {"mean_iou": sum(ious) / len(ious) if ious else 0.0, "accuracy": means["accuracy"], "loss": means["loss"]}

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction`, the likeliest class of each pixel at the size of the model's output, int64 [B, h, w]."""
        return {"prediction": outputs.argmax(dim=1)}


def _resized(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[2:] == targets.shape[1:]:
        return logits
    return F.interpolate(logits, size=targets.shape[1:], mode="bilinear", align_corners=False)


def _histograms(classes_BN: Tensor, num_classes: int) -> Tensor:
    """Count each class in each sample, [B, K]; values of K are left out. bincount would make the host wait for a GPU."""
    counts_BK = classes_BN.new_zeros(len(classes_BN), num_classes + 1)
    return counts_BK.scatter_add_(1, classes_BN, torch.ones_like(classes_BN))[:, :num_classes]


def _cross_entropy(logits_BKHW: Tensor, targets_BHW: Tensor, **options: Any) -> Tensor:
    """Return torch's cross entropy; pixels are flattened for deterministic algorithms: CUDA has no such kernel for [B, K, H, W]."""
    if torch.are_deterministic_algorithms_enabled():
        logits_BKHW, targets_BHW = logits_BKHW.movedim(1, -1).flatten(0, -2), targets_BHW.flatten()
    return F.cross_entropy(logits_BKHW, targets_BHW, **options)
