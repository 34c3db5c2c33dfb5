"""What the first step took of a rank's device, by part, in one line; and a warning where little is left."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.interfaces import Strategy, tensors_of
from ddp_train.system.process import resident_bytes
from ddp_train.training.parts.components import Components

logger = logging.getLogger(__name__)

_WORDS = re.compile(
    r"\bout of memory\b|can't allocate memory|CU(DNN|BLAS|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_\w+_ALLOCATION_FAILED|Failed to CUDA (calloc|malloc)|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
"""What torch's allocator, the CUDA runtime and driver, cuBLAS, cuDNN, NCCL and Triton say. cuBLAS is not initialised where its handle, made
at its first product, finds no memory."""
_MIB = 2.0**20
_MOST = 0.95  # of a device; what libraries take beside torch's allocator comes on top


def print_memory_use(components: Components, world: World) -> None:
    """Called after the first step that this process takes: rank 0 prints, every rank warns in its log. Asks the host alone."""
    parts = parts_of(components)
    spelled = [f"{name} {shown(size)}" for name, size in parts.items()]
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(world.device)
        on_device = 0 if components.strategy.shards(world.size).on_host else sum(parts.values())
        spelled.append(f"activations and all else {shown(max(0, peak - on_device))}, at most {shown(peak)} at a time")
    else:
        spelled.append(f"the process has {shown(resident_bytes())}")
    line = f"memory   {', '.join(spelled)}"
    logger.info(line)
    if world.is_main:
        print(line, flush=True)
    if world.device.type == "cuda":
        _warn(world)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory of the device or the machine was short."""
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or _WORDS.search(str(error)) is not None


def parts_of(components: Components) -> dict[str, int]:
    """Return what lasts, in bytes on this rank: parameters with buffers, gradients, and the optimizer's state. Shared ones count once."""
    trained, optimizer = components.trained, components.optimizer
    trainable = [parameter for parameter in trained.parameters() if parameter.requires_grad and components.early_step is None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    strategy = components.strategy
    kept = [*tensors_of(strategy.state_dict()), *tensors_of(strategy.own_state())]
    return {
        "parameters": _bytes([*trained.parameters(), *trained.buffers()]),
        "gradients": _bytes(
            trainable
        ),  # as large as what they are of; between two steps there may be none, and where the optimizer steps in backward some at a time
        "optimizer": _bytes(state),
        **({kept_for(strategy): _bytes(kept)} if kept else {}),
    }


def kept_for(strategy: Strategy) -> str:
    """Return what a rank's memory is called that a strategy keeps from one exchange to the next."""
    return "error feedback" if strategy.has_error_feedback else "synchronisation"


def _bytes(tensors: Iterable[Any]) -> int:
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # of shards, this rank's
    return sum({id(tensor): tensor.nbytes for tensor in own}.values())


def _warn(world: World) -> None:
    total = torch.cuda.get_device_properties(world.device).total_memory
    share = torch.cuda.max_memory_reserved(world.device) / total
    if share <= _MOST:
        return
    line = (
        f"warning  {share:.0%} of the {shown(total)} of rank {world.rank}'s device are taken: a longer or larger batch may not fit."
        " A smaller loader.micro_batch_size, activation_checkpointing=full or amp=bf16 leave more"
    )
    logger.warning(line)
    if world.is_main:
        print(line, flush=True)


def shown(size: int) -> str:
    """Return a number of bytes for a person."""
    return f"{size / _MIB / 1024:.2f} GiB" if size >= 1024 * _MIB else f"{size / _MIB:.1f} MiB"
