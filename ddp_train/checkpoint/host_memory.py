"""Memory of the host that a GPU can copy to by itself, as large as it was asked for.

torch's own pinned memory comes in powers of two: a share of 5 GB would take 8 GB, on each rank, for good. Here whole pages are made and
registered with CUDA, which makes the same of them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process, as torch registers its own


def allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return memory on the CPU, uint8, shape [num_bytes].

    Args:
        pinned: for a GPU. Given back to the system with the last tensor that uses it.
    """
    if not pinned or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    owner = (ctypes.c_uint8 * size).from_buffer(memory)  # the tensor's; it ends before the pages do, which CUDA must give back first
    values = torch.frombuffer(owner, dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(values.data_ptr(), size, _PORTABLE))
    if error:  # a limit on locked memory, say
        _forget_error()
        logger.warning(
            "checkpoints are copied to %d MB of memory that is not pinned (CUDA error %d): as right, but slower", size >> 20, error
        )
    else:
        weakref.finalize(owner, _give_back, memory, values.data_ptr()).atexit = False  # CUDA may be gone before
    return values[:num_bytes]


def _give_back(memory: mmap.mmap, address: int) -> None:
    """Let CUDA forget pages that are still there; `memory` goes with this call's end."""
    if torch.cuda.cudart().cudaHostUnregister(address):
        _forget_error()


def _forget_error() -> None:
    """Take CUDA's note of an error away, which the next kernel would be blamed for."""
    with suppress(Exception):
        torch.zeros(1, device="cuda")
