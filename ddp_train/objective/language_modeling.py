"""Language modelling: cross entropy of the next token, perplexity and bits per byte.

Shapes: B samples, T tokens, V vocabulary. A batch is `(tokens, targets)`, both int64, shape [B, T]; targets are the tokens one place later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Goal, batch_size
from ddp_train.objective.chunked_head import ChunkedHead, find_head
from ddp_train.objective.model_call import unwrap
from ddp_train.objective.supervised import ByCompare, at_least_float32, weighed

# torch's own default, -100, would drop such targets from the loss but not from `weight`. No tokeniser has this one; a target that is
# negative by mistake fails loudly.
_IGNORE_NOTHING = -(2**31)


class LanguageModeling(ByCompare):
    """Minimise the cross entropy between a model's logits, shape [B, T, V], and the next tokens. Every token weighs the same.

    Args:
        ignore_index: target value that counts nowhere (padding); None: every target counts, and `weight` needs no all-reduce.
        bytes_per_token: mean number of text bytes behind one token, for `bits_per_byte`; None: unknown, and the metric is absent.
        aux_weight: of what the model gives beside its logits: losses of shape [] (supervised.py).
        chunk_tokens: tokens of a micro-batch that have logits at a time; None: all. With it their memory is that of a chunk, and backward
            computes the logits once more. `compare` has them all.
        head: the module that gives the logits, for `chunk_tokens`; "auto": by its usual names.
    """

    goals: Mapping[str, Goal] = {"loss": "min", "perplexity": "min"}
    unit = "token"  # that `weight` counts

    def __init__(
        self,
        *,
        ignore_index: int | None = None,
        bytes_per_token: float | None = None,
        aux_weight: float | None = None,
        chunk_tokens: int | None = None,
        head: str = "auto",
    ) -> None:
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ConfigError(key="objective.chunk_tokens", happened=f"is {chunk_tokens}", expected="at least 1, or null: all at once")
        self.chunk_tokens, self.head = chunk_tokens, head
        self._chunked: ChunkedHead | None = None
        self.aux_weight = aux_weight
        self.ignore_index = ignore_index
        self.bytes_per_token = bytes_per_token
        if bytes_per_token is not None:
            self.goals = {**self.goals, "bits_per_byte": "min"}

    def bind_model(self, model: nn.Module) -> None:
        """Find the module whose logits come in chunks."""
        if self.chunk_tokens is not None:
            name, head = find_head(model, self.head)
            self._chunked = ChunkedHead(head, name=name, chunk_tokens=self.chunk_tokens, ignore_index=self._ignored())

    def weight(self, batch: Batch) -> int | Tensor:
        """Return the number of targets that count: B * T, or with `ignore_index` an int64 tensor of shape []."""
        _, targets_BT = batch
        if self.ignore_index is None:
            return int(targets_BT.numel())
        count: Tensor = (targets_BT != self.ignore_index).sum()
        return count

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy in nats, summed over the targets that count, shape [], at least float32."""
        losses, beside = self._losses(model, batch, reduction="sum")
        total = losses.sum() if losses.ndim else losses
        for aux, weight in weighed(beside, self.aux_weight):
            total = total + weight * aux.float() * self.weight(batch)
        return total

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` (sum in nats, float64) and the counts `tokens` and `samples`; each of shape []."""
        losses_N, _ = self._losses(model, batch, reduction="none")
        return self._totals(losses_N, batch)

    def compare(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Return what `score` returns, for each sample `loss` (sum in nats over its targets that count, float32 [B]) and `tokens` (how many
        those are, int64 [B]), and the logits, [B, T, V], with the next tokens: too large to be gathered, fine to be added up.
        """
        tokens_BT, targets_BT = batch
        logits_BTV = at_least_float32(unwrap(model(tokens_BT))[0])
        losses_BT = self._cross_entropy(logits_BTV, targets_BT, reduction="none").view_as(targets_BT)
        counts_BT = targets_BT != self._ignored()
        rows = {"loss": losses_BT.sum(dim=1, dtype=torch.float64).float(), "tokens": counts_BT.sum(dim=1)}
        return self._totals(losses_BT, batch), rows, (logits_BTV, targets_BT)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return `loss` (mean nats per token), `perplexity` (its exponential) and, where the bytes are known, `bits_per_byte`."""
        loss = totals["loss"] / totals["tokens"]
        metrics = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}  # exp overflows a float above 709
        if self.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def _ignored(self) -> int:
        return _IGNORE_NOTHING if self.ignore_index is None else self.ignore_index

    def _totals(self, losses: Tensor, batch: Batch) -> dict[str, Tensor]:
        _, targets_BT = batch
        tokens = self.weight(batch)
        return {
            "loss": losses.sum(dtype=torch.float64),
            # full(), not tensor(): that one copies from the host and waits.
            "tokens": tokens if isinstance(tokens, Tensor) else torch.full((), tokens, dtype=torch.int64, device=targets_BT.device),
            "samples": torch.full((), batch_size(batch), dtype=torch.int64, device=targets_BT.device),
        }

    def _losses(self, model: nn.Module, batch: Batch, *, reduction: str) -> tuple[Tensor, list[Tensor]]:
        """Return the losses, of shape [] for the reduction `sum`, or with a chunked head [N] for any; and what is beside the logits."""
        tokens_BT, targets_BT = batch
        if self._chunked is not None:
            return self._chunked.losses(lambda: unwrap(model(tokens_BT)), targets_BT)
        outputs, beside = unwrap(model(tokens_BT))
        return self._cross_entropy(at_least_float32(outputs), targets_BT, reduction=reduction), beside

    def _cross_entropy(self, logits_BTV: Tensor, targets_BT: Tensor, *, reduction: str) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction, ignore_index=self._ignored())
