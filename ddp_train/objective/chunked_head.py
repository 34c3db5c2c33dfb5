"""The last layer of a language model and its cross entropy, some tokens at a time, so that not all logits are in memory at once.

While a loss is asked for, the layer gives each token's loss in place of its logits. All of it happens within the model's forward: a
strategy that brings the layer's weights together for its forward finds them there. Backward computes a chunk's logits anew.

Shapes: B samples, T tokens, N tokens of a micro-batch (B * T), V vocabulary, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_train.errors import ConfigError
from ddp_train.interfaces import plain_name
from ddp_train.objective.supervised import at_least_float32

_NAMES = ("head", "lm_head", "output", "embed_out", "output_projection")
"""What the layer that gives the logits is called, as a rule."""


class ChunkedHead:
    """Lets a module give losses of tokens.

    Args:
        head: what gives the logits [..., V] of hidden states [..., D], for each token by itself.
        name: the head's, for errors.
        chunk_tokens: how many tokens have logits at a time.
        ignore_index: target whose loss is 0.
    """

    def __init__(self, head: nn.Module, *, name: str, chunk_tokens: int, ignore_index: int) -> None:
        self._head, self._name, self._chunk_tokens, self._ignore_index = head, name, chunk_tokens, ignore_index
        self._logits: Callable[[Tensor], Tensor] = head.forward
        self._call: Callable[[Tensor], Tensor] | None = None  # one object for all steps: a compiler looks at it
        self._targets_N: Tensor | None = None
        self._losses_N: Tensor | None = None
        self._is_compared = False

    def losses(self, forward: Callable[[], tuple[Tensor, list[Tensor]]], targets_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, float32 [N], and what the model gives beside it.

        Args:
            forward: the model's, which gives what its head gives, and what is beside it.
        """
        with self._giving_losses(targets_BT.flatten()):
            outputs, beside = forward()
        losses_N, self._losses_N = self._losses_N, None
        if losses_N is None:
            raise self._not_the_logits("was not called with all tokens in the model's forward")
        # A strategy may give a copy of it; that once is as good as always, and costs a wait for the device.
        is_same = outputs is losses_N or (outputs.shape == losses_N.shape and (self._is_compared or torch.equal(outputs, losses_N)))
        if not is_same:
            raise self._not_the_logits("does not give what the model gives: the model changes it")
        self._is_compared = True
        return outputs, beside

    @contextmanager
    def _giving_losses(self, targets_N: Tensor) -> Iterator[None]:
        own: dict[str, Any] = vars(self._head)
        before = own.get("forward")
        if self._call is None:  # a compiler breaks its graph here: a loop over chunks, which are checkpointed
            self._call = torch.compiler.disable(self._losses) if "torch._dynamo" in sys.modules else self._losses
        self._targets_N, own["forward"] = targets_N, self._call
        try:
            yield
        finally:
            self._targets_N = None
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before

    def _losses(self, hidden: Tensor) -> Tensor:
        targets_N = self._targets_N
        assert targets_N is not None
        hidden_ND = hidden.flatten(0, -2)
        if len(hidden_ND) != len(targets_N):
            raise self._not_the_logits(f"is given {len(hidden_ND):,} tokens for {len(targets_N):,} targets")
        parts = zip(hidden_ND.split(self._chunk_tokens), targets_N.split(self._chunk_tokens), strict=True)
        is_kept = not torch.is_grad_enabled() or hidden.is_meta  # there a step's operations are counted: no forward twice
        chunk = self._chunk if is_kept else partial(checkpoint, self._chunk, use_reentrant=False)
        losses: list[Any] = [chunk(*part) for part in parts]
        self._losses_N = torch.cat(losses)
        return self._losses_N

    def _chunk(self, hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        logits_CV = at_least_float32(self._logits(hidden_CD))
        return F.cross_entropy(logits_CV, targets_C, reduction="none", ignore_index=self._ignore_index)

    def _not_the_logits(self, why: str) -> ConfigError:
        return ConfigError(
            key="objective.head",
            happened=f"{self._name} ({type(self._head).__name__}) {why}",
            expected="the module whose output are the logits that the model gives, for each token by itself",
            fix="objective.head=NAME with another module; or objective.chunk_tokens=null",
        )


def find_head(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Return the module of a model that gives its logits, and its name.

    Args:
        name: "auto": what `get_output_embeddings` says, as transformers have it, or one of the usual names.
    """
    modules = {plain_name(f"{each}.").rstrip("."): module for each, module in model.named_modules()}
    if name != "auto":
        if name in modules and name:
            return name, modules[name]
        happened = f"is {name}, which the {type(model).__name__} does not have"
    else:
        said: Any = getattr(model, "get_output_embeddings", lambda: None)()
        found = [(each, module) for each, module in modules.items() if module is said]
        found += [(each, modules[each]) for each in _NAMES if each in modules]
        if found:
            return found[0]
        happened = f"is auto, and no module of the {type(model).__name__} is called {', '.join(_NAMES)}"
    parts = ", ".join(each for each, _ in model.named_children())
    raise ConfigError(
        key="objective.head", happened=happened, expected=f"the name of the module that gives the logits; the model has {parts}"
    )
