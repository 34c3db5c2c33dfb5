"""Memory of the host that a GPU can copy to by itself, as large as it was asked for.

torch's own pinned memory comes in powers of two: a share of 5 GB would take 8 GB, on each rank, for good. Here whole pages are made and
registered with CUDA, which makes the same of them.
"""

from __future__ import annotations

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
    values = torch.frombuffer(memory, dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    error = int(cuda.cudaHostRegister(values.data_ptr(), size, _PORTABLE))
    if error:  # a limit on locked memory, say
        with suppress(Exception):
            torch.zeros(1, device="cuda")  # takes CUDA's note of the error away, which the next kernel would be blamed for
        logger.warning(
            "checkpoints are copied to %d MB of memory that is not pinned (CUDA error %d): as right, but slower", size >> 20, error
        )
    else:
        weakref.finalize(memory, cuda.cudaHostUnregister, values.data_ptr()).atexit = False  # CUDA may be gone before
    return values[:num_bytes]
