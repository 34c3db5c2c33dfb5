"""What a job may change in its process, put back before the next job of a warm sweep: a job must not see who was there before it.

Components are garbage by then, and seeds, loggers, writers and the process group's contents are set anew by every job. This is the rest:
settings of the interpreter, of torch and of the process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: _default_device(), torch.set_default_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (np.geterr, lambda values: np.seterr(**values)),
    (os.getcwd, os.chdir),
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (lambda: list(warnings.filters), lambda filters: warnings.filters.__setitem__(slice(None), filters)),  # type: ignore[index]
    (lambda: logging.getLogger().level, logging.getLogger().setLevel),
    (lambda: logging.getLogger().handlers[:], lambda handlers: logging.getLogger().handlers.__setitem__(slice(None), handlers)),
    (lambda: (sys.excepthook, sys.stdout, sys.stderr), lambda found: _set_streams(*found)),
)


class Baseline:
    """The state of a process before its first job."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._settings = [(put, get()) for get, put in _SETTINGS]
        self._flags = [(owner, name, getattr(owner, name)) for owner, name in _FLAGS]
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self) -> None:
        """Put everything back, and free what the job has left on the device."""
        os.environ.clear()
        os.environ.update(self._environment)
        for put, value in self._settings:
            put(value)
        for owner, name, value in self._flags:
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.alarm(0)
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _default_device() -> torch.device | None:
    """Return what was given to `torch.set_default_device`; None when nothing was: to set CPU then would make every call of torch slower."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_streams(excepthook: Any, stdout: Any, stderr: Any) -> None:
    sys.excepthook, sys.stdout, sys.stderr = excepthook, stdout, stderr
