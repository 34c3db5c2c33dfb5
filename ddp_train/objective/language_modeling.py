"""Language modelling: cross entropy of the next token, perplexity and bits per byte.

Shapes: B samples, T tokens, V vocabulary. A batch is `(tokens, targets)`, both int64, shape [B, T]; targets are the tokens one place later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.interfaces import Batch, Goal, batch_size
from ddp_train.objective.model_call import unwrap
from ddp_train.objective.supervised import at_least_float32, weighed

# torch's own default, -100, would drop such targets from the loss but not from `weight`. No tokeniser has this one; a target that is
# negative by mistake fails loudly.
_IGNORE_NOTHING = -(2**31)


class LanguageModeling:
    """Minimise the cross entropy between a model's logits, shape [B, T, V], and the next tokens. Every token weighs the same.

    Args:
        ignore_index: target value that counts nowhere (padding); None: every target counts, and `weight` needs no all-reduce.
        bytes_per_token: mean number of text bytes behind one token, for `bits_per_byte`; None: unknown, and the metric is absent.
        aux_weight: of what the model gives beside its logits: losses of shape [] (supervised.py).
    """

    goals: Mapping[str, Goal] = {"loss": "min", "perplexity": "min"}
    unit = "token"  # that `weight` counts

    def __init__(self, *, ignore_index: int | None = None, bytes_per_token: float | None = None, aux_weight: float | None = None) -> None:
        self.aux_weight = aux_weight
        self.ignore_index = ignore_index
        self.bytes_per_token = bytes_per_token
        if bytes_per_token is not None:
            self.goals = {**self.goals, "bits_per_byte": "min"}

    def weight(self, batch: Batch) -> int | Tensor:
        """Return the number of targets that count: B * T, or with `ignore_index` an int64 tensor of shape []."""
        _, targets_BT = batch
        if self.ignore_index is None:
            return int(targets_BT.numel())
        count: Tensor = (targets_BT != self.ignore_index).sum()
        return count

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy in nats, summed over the targets that count, shape [], at least float32."""
        total, _, beside = self._losses(model, batch, reduction="sum")
        for aux, weight in weighed(beside, self.aux_weight):
            total = total + weight * aux.float() * self.weight(batch)
        return total

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` (sum in nats, float64) and the counts `tokens` and `samples`; each of shape []."""
        return self._score(model, batch)[0]

    def predict(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what `score` returns, and for each sample `loss` (sum in nats over its targets that count, float32 [B]) and `tokens` (how
        many those are, int64 [B]).
        """
        totals, rows, _ = self.compare(model, batch)
        return totals, rows

    def compare(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Return what `predict` returns, and the logits, [B, T, V], with the next tokens: too large to be gathered, fine to be added up."""
        totals, losses_BT, logits_BTV = self._score(model, batch)
        _, targets_BT = batch
        counts_BT = targets_BT != (_IGNORE_NOTHING if self.ignore_index is None else self.ignore_index)
        rows = {"loss": losses_BT.sum(dim=1, dtype=torch.float64).float(), "tokens": counts_BT.sum(dim=1)}
        return totals, rows, (logits_BTV, targets_BT)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return `loss` (mean nats per token), `perplexity` (its exponential) and, where the bytes are known, `bits_per_byte`."""
        loss = totals["loss"] / totals["tokens"]
        metrics = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}  # exp overflows a float above 709
        if self.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def _score(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        losses_N, logits_BTV, _ = self._losses(model, batch, reduction="none")
        _, targets_BT = batch
        tokens = self.weight(batch)
        totals = {
            "loss": losses_N.sum(dtype=torch.float64),
            # full(), not tensor(): that one copies from the host and waits.
            "tokens": tokens if isinstance(tokens, Tensor) else torch.full((), tokens, dtype=torch.int64, device=targets_BT.device),
            "samples": torch.full((), batch_size(batch), dtype=torch.int64, device=targets_BT.device),
        }
        return totals, losses_N.view_as(targets_BT), logits_BTV

    def _losses(self, model: nn.Module, batch: Batch, *, reduction: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        tokens_BT, targets_BT = batch
        outputs, beside = unwrap(model(tokens_BT))
        logits_BTV = at_least_float32(outputs)
        ignore_index = _IGNORE_NOTHING if self.ignore_index is None else self.ignore_index
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction, ignore_index=ignore_index)
        return losses, logits_BTV, beside
