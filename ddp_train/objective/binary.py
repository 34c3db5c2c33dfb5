"""Binary and multilabel classification: binary cross entropy, accuracy, F1, precision and recall; one yes or no a sample, or K labels.

Shapes: B samples, K labels. The batch's forms are those of supervised.py.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ddp_train.interfaces import Evaluated, Goal, Ratio, Value
from ddp_train.objective.supervised import Supervised


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

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted cross entropy in nats, the mean over samples and labels, shape []."""
        logits_BK, answers_BK = self._same_shape(outputs, targets)
        weight = None if self.positive_weight == 1 else logits_BK.new_full((), self.positive_weight)
        return F.binary_cross_entropy_with_logits(logits_BK, answers_BK, pos_weight=weight)

    def measure(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """Return `loss` (unweighted) and `exact` (every answer right) of each sample; `precision`, `recall` and `f1` of each label."""
        logits_BK, answers_BK = self._same_shape(outputs, targets)
        says_BK, is_BK = logits_BK > 0, answers_BK > 0.5
        hits_BK = says_BK & is_BK
        values: dict[str, Value] = {
            "loss": F.binary_cross_entropy_with_logits(logits_BK, answers_BK, reduction="none").mean(dim=1),
            "exact": (says_BK == is_BK).all(dim=1),
            "precision": Ratio(hits_BK, says_BK),
            "recall": Ratio(hits_BK, is_BK),
            "f1": Ratio(2 * hits_BK, says_BK.long() + is_BK.long()),
            "f1_by_label": Ratio(2 * hits_BK, says_BK.long() + is_BK.long(), by_column=True),
        }
        probabilities_BK, answers_BK = logits_BK.sigmoid(), answers_BK.long()
        return Evaluated(values, compared=(self._form(probabilities_BK), self._form(answers_BK)))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return `prediction`, 0 or 1, int64, and `probability` of a yes, float32; [B] or [B, K]."""
        logits = self._form(outputs)
        return {"prediction": (logits > 0).long(), "probability": logits.sigmoid().float()}

    def _form(self, values: Tensor) -> Tensor:
        return values[:, 0] if self._is_single and values.ndim == 2 else values

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

    def metrics(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `accuracy`, `f1`, `precision`, `recall` (of a yes, at probability 0.5; 0 without a hit) and `loss`."""
        of_yes = {name: _or_zero(means[name]) for name in ("f1", "precision", "recall")}
        return {"accuracy": means["exact"], **of_yes, "loss": means["loss"]}


class Multilabel(_BinaryCrossEntropy):
    """Minimise the mean binary cross entropy between a model's logits, shape [B, K], and answers of 0 or 1, shape [B, K]."""

    goals: Mapping[str, Goal] = {"f1": "max", "f1_macro": "max", "exact": "max", "loss": "min"}
    _is_single = False

    def metrics(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return `f1` (of all answers together), `f1_macro` (the mean over the labels; 0 for a label without a hit), `exact` and `loss`."""
        f1_by_label = [_or_zero(f1) for f1 in means["f1_by_label"]]
        macro = sum(f1_by_label) / len(f1_by_label)
        return {"f1": _or_zero(means["f1"]), "f1_macro": macro, "exact": means["exact"], "loss": means["loss"]}


def _or_zero(ratio: float) -> float:
    return ratio if ratio == ratio else 0.0  # NaN: there is neither a yes nor an answer yes
