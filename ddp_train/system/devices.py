"""Which GPUs this machine has, read without importing torch.

NVIDIA's management library is asked: it comes with the driver, and starts no CUDA. Its names and numbers are on
https://docs.nvidia.com/deploy/nvml-api. Without the library there is no driver, or a container has left it out.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from ddp_train.errors import plural

CPU_PROCESSES = 2  # processes on a machine without a GPU: enough to run the distributed code on a laptop

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TEXT_BYTES = 96  # the longest that the library asks for


@dataclass(frozen=True, kw_only=True)
class GpuInventory:
    gpus: tuple[str, ...] = ()  # NVIDIA H100 80GB HBM3, ... in the order of their slots
    driver: str = ""  # its version
    problem: str = ""  # why there are fewer than there could be


@cache
def ask_driver() -> GpuInventory | None:
    """Return the driver's answer, the same for the life of this process; None: its library is not there."""
    library = _load_nvml()
    if library is None:
        return None
    library.nvmlErrorString.restype = ctypes.c_char_p
    if code := library.nvmlInit_v2():
        return GpuInventory(problem=library.nvmlErrorString(code).decode())
    try:
        return _read(library)
    finally:
        library.nvmlShutdown()


def gpus() -> list[str]:
    """Return the names (for CUDA_VISIBLE_DEVICES) of the GPUs that a process started now would see.

    Ranks count again with torch; this only decides how many of them to start, and where.
    """
    count, visible = len(_machine().gpus), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]

    def is_valid(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    return list(takewhile(is_valid, map(str.strip, visible.split(","))))[:count]  # as for CUDA, the first invalid name ends the list


def why_none() -> str:
    """Return why no GPU can be used although the machine has an NVIDIA driver; "" where it has none, or it was chosen so."""
    machine, visible = _machine(), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = plural(len(machine.gpus), "GPU")
    if machine.gpus and visible in ("", "-1"):
        return ""
    if gpus():
        return "" if _torch_has_cuda() else f"this machine has {count}, but the installed torch was built without CUDA"
    if machine.gpus:
        return f"CUDA_VISIBLE_DEVICES={visible} names none of this machine's {count}"
    if machine.problem:
        return f"the NVIDIA driver shows no GPU: {machine.problem}"
    has_driver = ask_driver() is not None or Path("/proc/driver/nvidia/version").exists()
    return "the NVIDIA driver shows no GPU: see nvidia-smi" if has_driver else ""


def resolve_device(device: str) -> str:
    """Turn `auto` into `cuda` (a GPU is there, and torch was built for it) or `cpu`; other names stay."""
    if device != "auto":
        return device
    return "cuda" if gpus() and _torch_has_cuda() else "cpu"


def processes_per_node(configured: int | None, device: str) -> int:
    """Return how many processes one node runs: as configured, else one per GPU, else two on CPU."""
    if configured is not None:
        return configured
    return max(1, len(gpus())) if resolve_device(device) == "cuda" else CPU_PROCESSES


def _machine() -> GpuInventory:
    """Return this machine's GPUs; by their device files where a container has left NVIDIA's library out."""
    return ask_driver() or GpuInventory(gpus=tuple(path.name for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()))


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds the package without importing it
    return spec is not None and spec.origin is not None and any((Path(spec.origin).parent / "lib").glob("*torch_cuda*"))


def _load_nvml() -> Any:
    for name in _LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _read(library: Any) -> GpuInventory:
    number, gpus, problems = ctypes.c_uint(), [], []
    if code := library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return GpuInventory(problem=library.nvmlErrorString(code).decode())
    for index in range(number.value):
        handle = ctypes.c_void_p()
        if code := library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):  # fallen off the bus, or of another user
            problems.append(f"GPU {index}: {library.nvmlErrorString(code).decode()}")
        else:
            gpus.append(_text(library.nvmlDeviceGetName, handle))
    return GpuInventory(gpus=tuple(gpus), driver=_text(library.nvmlSystemGetDriverVersion), problem="; ".join(problems))


def _text(read: Callable[..., int], *arguments: Any) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    read(*arguments, text, _TEXT_BYTES)
    return text.value.decode()
