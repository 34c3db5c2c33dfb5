"""What of a model callbacks average over steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_train.interfaces import plain_name


def averaged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, and the running averages of its batch norms, by name. Of other buffers an average says nothing."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if buffer.is_floating_point():
                    yield plain_name(name), buffer


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in which small changes are not lost."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
