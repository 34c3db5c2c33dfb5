"""Language modelling: cross entropy of the next token, perplexity and bits per byte.

With `chunk_tokens` the model's last layer and the cross entropy take some tokens at a time, so that not all logits are in memory at once:
for a loss the layer returns each token's loss instead of its logits. All of this happens within the model's forward, where a strategy has
gathered the layer's weights. Backward computes a chunk's logits anew.

Shapes: B samples, T tokens, N tokens of a micro-batch (B * T), V vocabulary, D width.
A batch is `(tokens, targets)`, both int64, shape [B, T]; targets are the tokens one place later.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Evaluated, Goal, Objective, Value
from ddp_train.objective.supervised import IGNORE_NOTHING, at_least_float32, per_target, unwrap, weighed, with_aux

_HEAD_NAMES = ("head", "lm_head", "output", "embed_out", "output_projection")  # usual ones of the layer that returns the logits


class LanguageModeling(Objective):
    """Minimise the cross entropy between a model's logits, shape [B, T, V], and the next tokens. Every token weighs the same.

    Args:
        ignore_index: target value that counts nowhere (padding); None: every target counts, which spares one small all-reduce a step.
        bytes_per_token: mean number of text bytes in one token, for `bits_per_byte`; None: unknown, and the metric is absent.
        aux_weight: of the model's auxiliary losses of shape [] (supervised.py).
        chunk_tokens: tokens that have logits at a time, which backward computes once more; None: all. With it no `evaluation.metrics`.
        head: the module that gives the logits, for `chunk_tokens`; "auto": by its usual names.
    """

    goals: Mapping[str, Goal] = {"loss": "min", "perplexity": "min"}
    unit = "token"
    needs_labels = True
    binds_without_values = True
    argument_ranges: ClassVar = {"chunk_tokens": {"min": 1}}

    def __init__(
        self,
        *,
        ignore_index: int | None = None,
        bytes_per_token: float | None = None,
        aux_weight: float | None = None,
        chunk_tokens: int | None = None,
        head: str = "auto",
    ) -> None:
        self.chunk_tokens, self.head, self.aux_weight = chunk_tokens, head, aux_weight
        self.ignore_index, self.bytes_per_token = ignore_index, bytes_per_token
        self._ignored = IGNORE_NOTHING if ignore_index is None else ignore_index
        self._chunked: ChunkedHead | None = None
        if bytes_per_token is not None:
            self.goals = {**self.goals, "bits_per_byte": "min"}

    def bind_model(self, model: nn.Module) -> None:
        if self.chunk_tokens is not None:
            name, head = find_head(model, self.head)
            self._chunked = ChunkedHead(head=head, name=name, chunk_tokens=self.chunk_tokens, ignore_index=self._ignored)

    def loss(self, model: nn.Module, batch: Batch) -> Value:
        """Return the cross entropy in nats over the targets that count."""
        losses_BT, auxiliary, _ = self._losses(model, batch)
        loss: Value = per_target(losses_BT, batch[1], self.ignore_index)
        for aux, weight in weighed(auxiliary, self.aux_weight):
            loss = with_aux(loss, aux.float(), weight)
        return loss

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Return the `loss` over the targets that count; for each sample `loss` (sum in nats over them, float32 [B]) and `tokens` (their
        number, int64 [B]); and the logits, [B, T, V], with the next tokens: too large to be gathered, fine to be summed. A chunked head
        gives no logits to compare.
        """
        losses_BT, _, logits_BTV = self._losses(model, batch)
        targets_BT = batch[1]
        compared = None if logits_BTV is None else (logits_BTV, targets_BT)
        rows = {"loss": losses_BT.sum(dim=1, dtype=torch.float64).float(), "tokens": (targets_BT != self._ignored).sum(dim=1)}
        return Evaluated({"loss": per_target(losses_BT, targets_BT, self.ignore_index)}, rows, compared)

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return `loss` (mean nats per token), `perplexity` (its exponential) and, where the bytes are known, `bits_per_byte`."""
        loss = means["loss"]
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        if self.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return the loss of each token, [B, T]; the model's auxiliary losses; its logits, which a chunked head does not give."""
        tokens_BT, targets_BT = batch
        if self._chunked is not None:
            losses_N, auxiliary = self._chunked.losses(lambda: unwrap(model(tokens_BT)), targets_BT)
            return losses_N.view_as(targets_BT), auxiliary, None
        outputs, auxiliary = unwrap(model(tokens_BT))
        logits_BTV = at_least_float32(outputs)
        losses_N = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none", ignore_index=self._ignored)
        return losses_N.view_as(targets_BT), auxiliary, logits_BTV


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss in nats."""
    return math.exp(loss) if loss < 700 else math.inf  # exp overflows a float above 709


@dataclass(kw_only=True, eq=False)
class ChunkedHead:
    """Lets a model's head return the losses of tokens instead of logits."""

    head: nn.Module  # returns the logits [..., V] of hidden states [..., D], for each token by itself
    name: str  # of the head, for errors
    chunk_tokens: int  # how many tokens have logits at a time
    ignore_index: int  # target whose loss is 0

    def __post_init__(self) -> None:
        self._logits: Callable[[Tensor], Tensor] = self.head.forward
        self._call: Callable[[Tensor], Tensor] | None = None  # one object for all steps: a compiler guards on it
        self._targets_N: Tensor | None = None
        self._losses_N: Tensor | None = None
        self._is_checked = False

    def losses(self, forward: Callable[[], tuple[Tensor, list[Tensor]]], targets_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, float32 [N], and the model's outputs besides its head's."""
        with self._giving_losses(targets_BT.flatten()):
            outputs, auxiliary = forward()
        losses_N, self._losses_N = self._losses_N, None
        if losses_N is None:
            raise self._not_the_logits("was not called with all tokens in the model's forward")
        # A strategy may return a copy. One check is enough, and costs a wait for the device.
        if not (outputs is losses_N or (outputs.shape == losses_N.shape and (self._is_checked or torch.equal(outputs, losses_N)))):
            raise self._not_the_logits("does not give what the model gives: the model changes it")
        self._is_checked = True
        return outputs, auxiliary

    @contextmanager
    def _giving_losses(self, targets_N: Tensor) -> Iterator[None]:
        attributes: dict[str, Any] = vars(self.head)
        previous = attributes.get("forward")
        if self._call is None:  # a compiler breaks its graph here: a loop over chunks, which are checkpointed
            self._call = torch.compiler.disable(self._losses) if "torch._dynamo" in sys.modules else self._losses
        self._targets_N, attributes["forward"] = targets_N, self._call
        try:
            yield
        finally:
            self._targets_N = None
            if previous is None:
                del attributes["forward"]
            else:
                attributes["forward"] = previous

    def _losses(self, hidden: Tensor) -> Tensor:
        targets_N = self._targets_N
        assert targets_N is not None
        hidden_ND = hidden.flatten(0, -2)
        if len(hidden_ND) != len(targets_N):
            raise self._not_the_logits(f"is given {len(hidden_ND):,} tokens for {len(targets_N):,} targets")
        chunks = zip(hidden_ND.split(self.chunk_tokens), targets_N.split(self.chunk_tokens), strict=True)
        is_kept = not torch.is_grad_enabled() or hidden.is_meta  # there a step's operations are counted: no forward twice
        losses_of = self._chunk if is_kept else partial(checkpoint, self._chunk, use_reentrant=False)
        self._losses_N = torch.cat([losses_of(*chunk) for chunk in chunks])
        return self._losses_N

    def _chunk(self, hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(self._logits(hidden_CD)), targets_C, reduction="none", ignore_index=self.ignore_index)

    def _not_the_logits(self, why: str) -> ConfigError:
        happened = f"{self.name} ({type(self.head).__name__}) {why}"
        expected = "the module whose output is the model's logits, for each token separately"
        fix = "objective.head=NAME with another module; or objective.chunk_tokens=null"
        return ConfigError(key="objective.head", happened=happened, expected=expected, fix=fix)


def find_head(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Return the module that returns a model's logits, and its name; auto: from `get_output_embeddings`, or by the usual names."""
    modules = dict(model.named_modules())
    if name != "auto":
        if name in modules and name:
            return name, modules[name]
        happened = f"is {name}, which the {type(model).__name__} does not have"
    else:
        embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)()
        candidates = [(path, module) for path, module in modules.items() if module is embeddings]
        candidates += [(path, modules[path]) for path in _HEAD_NAMES if path in modules]
        if candidates:
            return candidates[0]
        happened = f"is auto, and no module of the {type(model).__name__} is called {', '.join(_HEAD_NAMES)}"
    children = ", ".join(child for child, _ in model.named_children())
    raise ConfigError(key="objective.head", happened=happened, expected=f"the module that gives the logits; the model has {children}")
