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
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from ddp_train import FOLDER, torch_internals
from ddp_train.training.parts import compiled

_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(FOLDER))
_HOOKS = [
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict)
]
_FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
_PRECISIONS = (  # (backend, operation) of `torch.backends.fp32_precision` and its kin, the general ones before those that follow them
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)
_KNOWS_TORCH = not torch_internals.missing(torch_internals.OF_PRECISIONS)
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: None, torch.set_default_device),  # None: no default. Any other, also "cpu", would put a mode around every call of torch
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, lambda count: _set_num_threads(count)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (lambda: [dict(hooks) for hooks in _HOOKS], lambda found: _set_hooks(found)),
    (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    (lambda: logging.root.manager.disable, logging.disable),
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
        self._settings = [(put, value) for get, put in _SETTINGS for value in _asked(get)]
        self._flags = [(owner, name, value) for owner, name in _FLAGS for value in _asked(partial(getattr, owner, name))]
        self._precisions = _take_precisions()
        _set_precisions(self._precisions)
        # Not SIGCHLD, which torch's DataLoader sets once in a process's life.
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals() if number != signal.SIGCHLD}
        self._modules = set(sys.modules)

    def restore(self) -> None:
        """Put everything back, and free what the job has left on the device."""
        os.environ.clear()
        os.environ.update(self._environment)
        for put, value in self._settings:
            put(value)
        for owner, name, value in self._flags:
            setattr(owner, name, value)  # without looking: where the job mixed torch's older and newer ways, looking raises
        _set_precisions(self._precisions)  # last: the older ways set them too, and more than was set before
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.alarm(0)
        self._forget_users_modules()
        compiled.forget()
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _forget_users_modules(self) -> None:
        """Drop the modules that the job imported from the user's own folders: what they keep at their top level is the job's."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if name not in self._modules and file.endswith(".py") and not file.startswith(_INSTALLED):
                del sys.modules[name]


def _asked(get: Callable[[], Any]) -> list[Any]:
    """Return a setting, alone; nothing where torch does not answer, because its precision was set in the newer way only (`_PRECISIONS`)."""
    with suppress(RuntimeError):
        return [get()]
    return []


def _take_precisions() -> list[str]:
    """Return what each of `_PRECISIONS` has of its own, and take it away: one that has nothing answers with a more general one's."""
    found: list[str] = []
    for backend, operation in _PRECISIONS if _KNOWS_TORCH else ():
        found.append(torch._C._get_fp32_precision_getter(backend, operation))
        torch._C._set_fp32_precision_setter(backend, operation, "none")
    return found


def _set_precisions(values: list[str]) -> None:
    """Set `_PRECISIONS`. Not through torch.backends: `mkldnn.fp32_precision` sets the general one (torch 2.13)."""
    for (backend, operation), value in zip(_PRECISIONS, values, strict=_KNOWS_TORCH):
        torch._C._set_fp32_precision_setter(backend, operation, value)


def _set_hooks(found: list[dict[Any, Any]]) -> None:
    for hooks, before in zip(_HOOKS, found, strict=True):
        hooks.clear()
        hooks.update(before)


def _set_num_threads(count: int) -> None:
    """Set torch's number of threads where the job has changed it: setting it takes from MKL the choice of fewer, for good."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _set_streams(excepthook: Any, stdout: Any, stderr: Any) -> None:
    sys.excepthook, sys.stdout, sys.stderr = excepthook, stdout, stderr
