"""Imported by the server that loader workers are forked from, before all else: what holds for it and for every worker."""

import ctypes
import os

from ddp_train.system import handover
from ddp_train.system.process import die_with_parent

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

_rank = os.environ.get(handover.LOADER_RANK)
die_with_parent(int(_rank) if _rank else None)  # with the rank, also while it imports torch, and if it has gone already

# A worker allocates the same batch again and again. Giving the memory back each time, as malloc does, costs more than filling it.
_mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
_mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that there is
_mallopt(_M_TRIM_THRESHOLD, 1 << 30)
