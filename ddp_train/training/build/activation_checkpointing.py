"""Activation checkpointing: a block keeps its inputs alone, and computes the rest anew in backward (`activation_checkpointing`).

A block's class gets a subclass of the same name whose forward is checkpointed by torch: names in the model, its state, hooks and what a
strategy or a compiler looks for stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ddp_train.config.schema import ActivationCheckpointingConfig
from ddp_train.errors import ConfigError, conflict, join_few
from ddp_train.interfaces.parameters import blocks_of
from ddp_train.system import torch_internals

_KEY = "activation_checkpointing"
_HOOKS = "respect_saved_tensors_hooks"
"""Since torch 2.15: what is kept goes through the hooks of `save_on_cpu` and the like, as every other saved tensor does."""


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointingConfig) -> str:
    """Let the chosen blocks keep less for backward, in place, before they are wrapped or compiled; return what is done, for a person."""
    assert config.blocks is not None
    if lacks := torch_internals.missing(torch_internals.OF_CHECKPOINTING):
        raise ConfigError(key=_KEY, happened=lacks[0], fix=f"{_KEY}=off")
    blocks = blocks_of(model, config.blocks, key=f"{_KEY}.blocks")
    if not blocks:
        happened = f"is auto, and nothing repeats in the {type(model).__name__}"
        raise conflict(f"{_KEY}.blocks", happened, f"[CLASS], or {_KEY}=off", expected="names of classes of the model's parts")
    saved = [overload for name in config.save_ops for overload in _operation(name)]
    chosen = [module for number, module in enumerate(blocks.values()) if number % config.every == 0]
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in chosen:
        kind = type(module)
        classes[kind] = classes.get(kind) or _checkpointed(kind, saved)
        module.__class__ = classes[kind]
    names = join_few(sorted({kind.__name__ for kind in classes}))
    kept = f", except the results of {len(config.save_ops)} operations" if saved else ""
    return f"memory   {len(chosen)} of {len(blocks)} blocks ({names}) are recomputed in backward{kept}"


def _operation(name: str) -> list[Any]:
    """Return the overloads of one of torch's operations: `aten.mm`, or `aten.mm.default` for one of them."""
    operation: Any = torch.ops
    try:
        for part in name.removeprefix("torch.ops.").split("."):
            operation = getattr(operation, part)
        is_overload = isinstance(operation, torch._ops.OpOverload)
        return [operation] if is_overload else [getattr(operation, overload) for overload in operation.overloads()]
    except (AttributeError, RuntimeError):
        expected = "names below torch.ops: aten.mm, aten._scaled_dot_product_flash_attention"
        raise ConfigError(key=f"{_KEY}.save_ops", happened=f"torch has no operation {name}", expected=expected) from None


def _checkpointed(kind: Any, saved: list[Any]) -> type[nn.Module]:
    """Return a class as `kind`, of the same name, whose forward is checkpointed where gradients are taken."""
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, saved)} if saved else {}
    if saved and _HOOKS in inspect.signature(checkpoint).parameters:
        contexts[_HOOKS] = True

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return checkpoint(self._forward_once_or_again, *args, use_reentrant=False, **contexts, **kwargs)

    def forward_once_or_again(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A graph that is compiled has its changes of buffers once; else backward is where it is computed again.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return kind.forward(self, *args, **kwargs)
        with _unchanged_buffers(self):
            return kind.forward(self, *args, **kwargs)

    own: dict[str, Callable[..., Any]] = {"forward": forward, "_forward_once_or_again": forward_once_or_again}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})


@contextmanager
def _unchanged_buffers(block: nn.Module) -> Iterator[None]:
    """Let what a block computes again leave its running averages as they are, which have had this batch; it may change no others."""
    from torch.utils._python_dispatch import _disable_current_modes  # private (torch_internals.py)

    averages = [(module, dict(module._buffers)) for module in block.modules() if getattr(module, "track_running_stats", False)]
    with_averages = [module for module, _ in averages]
    others = [
        (f"{path}.{name}".lstrip("."), each, each._version)
        for path, module in block.named_modules()
        for name, each in (() if module in with_averages else module.named_buffers(recurse=False))
    ]
    with _disable_current_modes():  # of torch, which compare what is computed again with what was computed first
        for module, kept in averages:  # copies take what forward adds, and are forgotten
            module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in kept.items()})
    try:
        yield
    finally:
        for module, kept in averages:
            module._buffers.update(kept)
        for name, buffer, version in others:
            if buffer._version != version:
                happened = f"the forward of {type(block).__name__} changes its buffer {name}, and is computed twice"
                expected = "blocks that change no buffer but averages of batch norm"
                raise conflict(f"{_KEY}.blocks", happened, f"[CLASS] with other blocks, or {_KEY}=off", expected=expected)
