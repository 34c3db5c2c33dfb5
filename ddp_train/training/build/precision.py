"""How float32 is computed and how images lie in memory (`precision`), and what `amp=auto` comes to on the ranks' devices."""

from __future__ import annotations

import torch
from torch import nn

from ddp_train.amp import best_dtype
from ddp_train.config.schema import PrecisionConfig
from ddp_train.distributed.world import World

_TORCHS_OWN = "highest"


def use_precision(config: PrecisionConfig) -> None:
    """Set what holds for the whole process; `rank.isolation` puts it back after a job of a sweep."""
    if config.float32_matmul_precision != _TORCHS_OWN:  # else setting it would cut off what follows `torch.backends.fp32_precision`
        torch.set_float32_matmul_precision(config.float32_matmul_precision)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def in_memory_format(model: nn.Module, config: PrecisionConfig) -> nn.Module:
    """Let a model's weights lie as `precision.channels_last` says: a convolution's output lies as its weights do."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def shared_dtype(world: World) -> str | None:
    """Return what `amp.dtype=auto` means for all ranks: half precision where each device has it. Collective."""
    found = set(world.gather(best_dtype(world.device)))
    return found.pop() if len(found) == 1 else None
