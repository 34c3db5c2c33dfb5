"""How many threads the libraries of this process use for arithmetic, after they were loaded: what OMP_NUM_THREADS says before."""

from __future__ import annotations

import ctypes
import os

from ddp_train.system.process import loaded_libraries

VARIABLE = "OMP_NUM_THREADS"
_OPENMP = ("libgomp", "libomp", "libiomp")
_OPENBLAS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")]


def set_threads(count: int) -> None:
    """Set the number for every OpenMP and OpenBLAS that is loaded. Of OpenMP: for this thread and those that it starts in parallel."""
    for path in loaded_libraries():
        name = os.path.basename(path)
        if name.startswith(_OPENMP):
            ctypes.CDLL(path).omp_set_num_threads(count)
        elif "openblas" in name:
            library = ctypes.CDLL(path)
            for each in _OPENBLAS:
                if hasattr(library, each):
                    getattr(library, each)(count)
                    break
