"""A rank that is forked from a process that has imported everything. It must be like a fresh interpreter that torchrun starts.

The fork has the modules. Here it gets what belongs to a rank: environment, streams, threads, random state.
"""

import ctypes
import importlib
import os
import sys
from contextlib import suppress

import numpy as np
import torch

from ddp_train.launch.fork_requests import RankRequest
from ddp_train.system import process, process_env
from ddp_train.system.fork_server import interpreter

_OPENMP = ("libgomp", "libomp", "libiomp")
_OPENBLAS_SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")]


def setup_forked_rank(request: RankRequest) -> None:
    """Make this process the rank that the agent asks for (`launch.agent.ranks`), or a fresh interpreter where a fork cannot be it."""
    os.environ.update(request.environment)
    for number, path in ((1, request.stdout), (2, request.stderr)):
        if path:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(descriptor, number)
            os.close(descriptor)
    asked = os.environ.get(process.NUM_THREADS, "")  # one that is no number was there when the libraries were loaded
    if has_used_gpu() or (asked.isdigit() and not _set_threads(int(asked))):
        os.execve(sys.executable, [*interpreter(), *request.words], dict(os.environ))
    os.environ.pop(process_env.AGENT, None)  # it is tied to it already
    sys.argv[1:] = request.words
    importlib.invalidate_caches()
    np.random.seed()  # `random` does so itself


def has_used_gpu() -> bool:
    """Tell whether this process, or the one that it was forked from, has begun CUDA, which no fork survives.

    Torch knows its own use alone. CuPy, Numba and DALI open this device, too; NVML, which may be forked, does not. A user's sitecustomize
    may import any of them.
    """
    is_open = any(file == "/dev/nvidia-uvm" for _, file in process.open_files(os.getpid()))
    return is_open or torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()


def _set_threads(count: int) -> bool:
    """Let torch, MKL and what else is loaded use so many threads, as OMP_NUM_THREADS does at a start; tell whether that could be done.

    Not by `torch.set_num_threads` where there is MKL, which then could not use fewer threads for small products any more: torch forbids it
    again in each thread that it meets, and a step of a small transformer takes 3 to 5 % longer.
    """
    with suppress(AttributeError, OSError):  # a library that takes no number any more
        for path in process.loaded_libraries():
            name = os.path.basename(path)
            if name.startswith(_OPENMP):  # for this thread and those that it starts in parallel
                ctypes.CDLL(path).omp_set_num_threads(count)
            elif "openblas" in name:
                library = ctypes.CDLL(path)
                if setters := [name for name in _OPENBLAS_SETTERS if hasattr(library, name)]:
                    getattr(library, setters[0])(count)
        try:
            ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD).mkl_serv_set_num_threads(count)  # torch asks it in each further thread
        except (AttributeError, OSError):  # a torch without MKL
            torch.set_num_threads(count)
        return torch.get_num_threads() == count
    return False
