"""What of a batch the model is given, and what of its output counts.

batch                          call
(inputs, targets)              model(inputs)
(a, b, targets)                model(a, b)
{"a": ..., "labels": ...}      model(a=...); the targets are called target, targets, label or labels

output                         counts                beside it
a tensor                       the tensor
(logits, aux, ...)             the first             the rest
{"out": ..., "aux": ...}       `logits` or `out`     `aux`, `aux_logits`, `aux_loss`; so with transformers' ModelOutput
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, describe

TARGETS = ("target", "targets", "label", "labels")
"""What the targets may be called in a batch that is a dict."""

_COUNTS = ("logits", "out")
_BESIDE = ("aux", "aux_logits", "aux_loss")


def call(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """Return what the model gives for the batch's inputs, and the batch's targets."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:  # as nearly all are
        return model(batch[0]), batch[1]
    inputs, targets = split(batch)
    return give(model, inputs), targets


def split(batch: Batch) -> tuple[Any, Any]:
    """Return the inputs of a batch, a tuple or a dict of the model's arguments, and its targets."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) != 1:
            raise ConfigError(
                key="loader.fields",
                happened=f"is null, and {len(names)} of a batch's keys ({', '.join(map(str, batch))}) are called {', '.join(TARGETS)}",
                expected="one that has the targets; or the keys to train on, the targets last",
                fix="loader.fields=[INPUT,TARGET]",
            )
        return {name: value for name, value in batch.items() if name != names[0]}, batch[names[0]]
    raise ConfigError(
        key="data",
        happened=f"a batch is {describe(batch)}",
        expected="(inputs, targets), with several inputs (a, b, targets), or a dict",
        fix="an objective of your own for other batches (ddp_train.interfaces.Objective)",
    )


def give(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a tuple of arguments, a dict of them, or one tensor."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def unwrap(outputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Return what counts of a model's output, and what is beside it.

    Raises:
        TypeError: there is nothing that is known to count.
    """
    if isinstance(outputs, Tensor):
        return outputs, []
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0], [part for part in outputs[1:] if isinstance(part, Tensor)]
    named = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    for name in _COUNTS:
        if isinstance(found := named.get(name), Tensor):
            return found, [named[beside] for beside in _BESIDE if isinstance(named.get(beside), Tensor)]
    raise TypeError(f"a model gives a tensor, a tuple that begins with it, or a dict with {' or '.join(_COUNTS)}; not {describe(outputs)}")
