"""Classification into K classes: cross entropy, accuracy and top-5 accuracy.

Shapes: B samples, K classes. Targets are labels, int64 in [0, K), shape [B]; the batch's forms are those of supervised.py.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Evaluated, Goal, Value
from ddp_train.objective.supervised import Supervised


class Classification(Supervised):
    """Minimise the cross entropy between a model's logits, shape [B, K], and the labels. Every sample weighs the same.

    Args:
        label_smoothing: share of the target spread evenly over all K classes, in [0, 1]; training only, metrics are not smoothed.
        aux_weight: of the model's auxiliary outputs (supervised.py).

    Source: Szegedy et al. 2015, arXiv:1512.00567, section 7 (label smoothing).
    """

    labels_are_classes = True
    goals: Mapping[str, Goal] = {"accuracy": "max", "accuracy_top5": "max", "loss": "min"}

    def __init__(self, *, label_smoothing: float = 0.0, aux_weight: float | None = None) -> None:
        super().__init__(aux_weight=aux_weight)
        self.label_smoothing = label_smoothing

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the smoothed cross entropy in nats, shape []."""
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `accuracy`, `accuracy_top5` (if K > 5) and `loss` (unsmoothed) of each sample; probabilities [B, K] for metrics: given
        logits, torchmetrics would guess for each batch.
        """
        values: dict[str, Value] = {"accuracy": outputs.argmax(dim=1) == targets}
        if outputs.shape[1] > 5:
            values["accuracy_top5"] = (outputs.topk(5, dim=1).indices == targets[:, None]).any(dim=1)
        values["loss"] = F.cross_entropy(outputs, targets, reduction="none")
        return Evaluated(values, compared=(outputs.softmax(dim=1), targets))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction` (the likeliest class), int64 [B], and `probability` (that the model gives to it), float32 [B]."""
        prediction_B = outputs.argmax(dim=1)  # as for `accuracy`: the softmax may round two classes to the same probability
        probability_B = outputs.softmax(dim=1).gather(1, prediction_B[:, None])[:, 0]
        return {"prediction": prediction_B, "probability": probability_B.float()}
