"""Faults on purpose: `debug.faults` lists what a rank is to do to itself, so that one can see what a run does about it.

A listener of `Phases`; a run without faults has none. Most are plain system calls. docs/faults.md says what each of them leads to.
"""

import ctypes
import logging
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ddp_train.config.schema import FaultConfig
from ddp_train.config.values import EVERY_ATTEMPT
from ddp_train.distributed.world import World
from ddp_train.errors import UserError
from ddp_train.interfaces import Indices
from ddp_train.interfaces.strategy import local_rows
from ddp_train.run_folder.paths import RunFolder, step_folders
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.process_env import restart_count
from ddp_train.training.parts.components import Components

logger = logging.getLogger(__name__)

ROOM_BYTES = 4096  # where a file ends on a disk without space: in its midst, as on a real one
_SPIKE, _DRIFT = 100.0, 0.5
_FOR_EVER_S = 1e8


class InjectedFault(Exception):
    """The exception of the fault `exception`, and of `worker_raise`."""


def inject(faults: Sequence[FaultConfig], phases: Phases, components: Components, world: World, run_folder: RunFolder) -> None:
    """Let this rank's faults of this attempt happen when their time has come. To be called before the first batch is asked for."""
    world.print(f"debug    faults to inject: {', '.join(fault.kind for fault in faults)}")
    if of_rank := [fault for fault in faults if fault.rank == world.rank and fault.attempt in (restart_count(), EVERY_ATTEMPT)]:
        phases.listen(_Injector(of_rank, components, run_folder))


class _Injector:
    def __init__(self, faults: list[FaultConfig], components: Components, run_folder: RunFolder) -> None:
        self._waiting = faults
        self._components = components
        self._checkpoints = run_folder.checkpoints
        self._hooks: list[RemovableHandle] = []  # until the step is over
        self._hooked_at = 0
        self._reads_fail = _let_reads_fail(components) if any(fault.kind == "worker_raise" for fault in faults) else None

    def __call__(self, phase: Phase, step: int) -> None:
        is_over = phase not in (Phase.DATA, Phase.STEP) or step != self._hooked_at  # a step may wait for data in its midst
        while self._hooks and is_over:
            self._hooks.pop().remove()
        for fault in list(self._waiting):
            is_due = fault.step is None or step == fault.step or (fault.kind == "slow" and step > fault.step)
            if phase != fault.phase or not is_due:
                continue
            if fault.kind != "slow":
                self._waiting.remove(fault)
                logger.warning("debug.faults: %s, at %s after step %d", fault.kind, phase, step)
            self._strike(fault, step)

    def _strike(self, fault: FaultConfig, step: int) -> None:
        checkpoints = self._checkpoints
        match fault.kind:
            case "sleep" | "slow":
                time.sleep(_FOR_EVER_S if fault.seconds is None else fault.seconds)
            case "worker_kill" | "worker_stop":
                pids = [child.pid for child in multiprocessing.active_children() if child.name == "loader worker" and child.pid is not None]
                if not pids:
                    expected = "a fault at phase step or later"
                    raise UserError(key="debug.faults", happened="this rank has no loader workers yet", expected=expected)
                os.kill(min(pids), signal.SIGKILL if fault.kind == "worker_kill" else signal.SIGSTOP)
            case "worker_raise":
                assert self._reads_fail is not None
                self._reads_fail.set()
            case "no_space":
                limit_space(os.getpid(), ROOM_BYTES)
            case "read_only":
                checkpoints.mkdir(exist_ok=True)
                checkpoints.chmod(0o500)
            case "truncate" | "bit_flip" | "missing_file":
                logger.warning("debug.faults: %s of %s", fault.kind, damage(checkpoints, fault.kind))
            case "nan" | "spike":
                factor = float("nan") if fault.kind == "nan" else _SPIKE
                self._hooked_at = step
                self._hooks.append(self._components.model.register_forward_hook(partial(_scale_output, factor)))
            case "drift":
                trained = next(parameter for parameter in self._components.model.parameters() if parameter.requires_grad)
                with torch.no_grad():
                    local_rows(trained).view(-1)[:1] += _DRIFT
            case kind:
                ON_ITSELF[kind]()


def _raise() -> None:
    raise InjectedFault("debug.faults asked for it")


def _loop() -> None:
    while True:
        pass


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ON_ITSELF: Mapping[str, Callable[[], object]] = {
    "exception": _raise,
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "segfault": partial(ctypes.string_at, 0),
    "exit": partial(os._exit, 0),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "gil": partial(re.match, "(a?){64}a{64}", "a" * 64),  # tries 2^64 ways, and keeps Python's lock meanwhile, as a C extension can
    "loop": _loop,
    "deadlock": _deadlock,
    **{name.lower(): partial(signal.raise_signal, signal.Signals[name]) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")},
}
"""The faults that need to know nothing of the run."""


def limit_space(pid: int, room: int | None) -> None:
    """Let no file that a process writes grow beyond so many bytes: its writes fail, with EFBIG where a full disk has ENOSPC."""
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if room is None else room, most))


def damage(checkpoints: Path, kind: str) -> Path:
    """Spoil the largest file of the newest checkpoint, and return it; UserError where there is none.

    Kinds are truncate (half of it stays), bit_flip (one bit, in its middle) and missing_file.
    """
    if not (saved := step_folders(checkpoints)):
        raise UserError(key="debug.faults", happened=f"{kind}: {checkpoints} has no checkpoint yet", fix="a later step")
    file = max((path for path in saved[-1][1].rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    middle = file.stat().st_size // 2
    if kind == "missing_file":
        file.unlink()
    elif kind == "truncate":
        os.truncate(file, middle)
    else:
        with file.open("r+b") as stream:
            stream.seek(middle)
            byte = stream.read(1)[0]
            stream.seek(middle)
            stream.write(bytes([byte ^ 1]))
    return file


def _scale_output(factor: float, module: nn.Module, arguments: object, output: object) -> object:
    """Multiply what the model gives, and so the loss and the gradients of this rank (a hook)."""
    return tree_map(lambda value: value * factor if isinstance(value, Tensor) and value.is_floating_point() else value, output)


def _read_or_raise(read: Callable[[Indices], Any], fails: Any, indices: Indices) -> Any:
    """Do what a data source's `batch` does until a certain moment, and then raise, in whichever process it is called."""
    if fails.is_set():
        _raise()
    return read(indices)


def _let_reads_fail(components: Components) -> Any:
    """Return an event that lets every read of a training sample fail from then on, also in loader workers that will be started."""
    source = components.train_loader.source
    if source is None:
        raise UserError(key="debug.faults", happened="worker_raise: the data is a stream", expected="data with positions")
    fails = multiprocessing.get_context("forkserver").Event()
    source.batch = partial(_read_or_raise, source.batch, fails)  # type: ignore[method-assign]
    return fails
