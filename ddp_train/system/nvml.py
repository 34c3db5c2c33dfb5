"""NVIDIA's management library, asked which GPUs this machine has: it comes with the driver, and starts no CUDA.

Names and numbers: https://docs.nvidia.com/deploy/nvml-api. Where it is not there, there is no driver, or a container has left it out.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_UUID_BYTES = 96
_NAME_BYTES = 96
_DRIVER_BYTES = 80


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    uuid: str  # GPU-...
    name: str = ""  # NVIDIA H100 80GB HBM3
    mig: tuple[str, ...] | None = None  # UUIDs of its parts (MIG-...); None: it is not to be parted


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the driver says of this machine."""

    gpus: tuple[Gpu, ...] = ()  # in the order of their slots
    driver: str = ""  # its version
    problem: str = ""  # why there are fewer than there could be


@cache
def ask() -> Machine | None:
    """Return what the driver says, the same for the life of this process; None: its library is not there."""
    library = _load()
    if library is None:
        return None
    if code := library.nvmlInit_v2():
        return Machine(problem=_text(library, code))
    try:
        return _read(library)
    finally:
        library.nvmlShutdown()


def _read(library: Any) -> Machine:
    number, found, problems = ctypes.c_uint(), [], []
    if code := library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return Machine(problem=_text(library, code))
    for index in range(number.value):
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if code:  # fallen off the bus, or somebody else's
            problems.append(f"GPU {index}: {_text(library, code)}")
        else:
            found.append(Gpu(uuid=_uuid(library, handle), name=_name(library, handle), mig=_parts(library, handle)))
    driver = ctypes.create_string_buffer(_DRIVER_BYTES)
    library.nvmlSystemGetDriverVersion(driver, _DRIVER_BYTES)
    return Machine(gpus=tuple(found), driver=driver.value.decode(), problem="; ".join(problems))


def _parts(library: Any, gpu: ctypes.c_void_p) -> tuple[str, ...] | None:
    mode, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetMigMode(gpu, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
        return None  # off, or a GPU that has no such mode
    library.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most))
    parts = []
    for index in range(most.value):
        part = ctypes.c_void_p()
        if not library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(part)):  # else there is none at this place
            parts.append(_uuid(library, part))
    return tuple(parts)


def _uuid(library: Any, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_UUID_BYTES)
    library.nvmlDeviceGetUUID(device, text, _UUID_BYTES)
    return text.value.decode()


def _name(library: Any, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    library.nvmlDeviceGetName(device, text, _NAME_BYTES)
    return text.value.decode()


def _text(library: Any, code: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    text: bytes = library.nvmlErrorString(code)
    return text.decode()


def _load() -> Any:
    for name in _LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None
