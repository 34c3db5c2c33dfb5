"""Which GPUs this machine has, read without importing torch.

NVIDIA's management library is asked: it comes with the driver, and starts no CUDA. Its names and numbers are on
https://docs.nvidia.com/deploy/nvml-api. Without the library there is no driver, or a container has left it out.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ddp_train.errors import plural

CPU_PROCESSES = 2  # processes on a machine without a GPU: enough to run the distributed code on a laptop

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TEXT_BYTES = 96  # the longest that the library asks for


@dataclass(frozen=True, kw_only=True)
class Gpu:
    uuid: str  # GPU-...
    name: str = ""  # NVIDIA H100 80GB HBM3
    mig: tuple[str, ...] | None = None  # UUIDs of its MIG devices (MIG-...); None: MIG is off


@dataclass(frozen=True, kw_only=True)
class GpuInventory:
    gpus: tuple[Gpu, ...] = ()  # in the order of their slots
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
    machine = _machine()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.startswith(("GPU-", "MIG-")) and ask_driver() is None:  # what they mean is not known
        return [name.strip() for name in visible.split(",")][: len(machine.gpus)]
    if visible is not None:
        return _chosen(visible, machine.gpus)
    if all(gpu.mig is None for gpu in machine.gpus):
        return [str(number) for number in range(len(machine.gpus))]
    without_mig = [gpu.uuid for gpu in machine.gpus if gpu.mig is None]
    return without_mig or [uuid for gpu in machine.gpus for uuid in gpu.mig or ()][:1]  # CUDA shows a process one MIG device


def why_none() -> str:
    """Return why no GPU can be used although the machine has an NVIDIA driver; "" where it has none, or it was chosen so."""
    machine, visible = _machine(), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = plural(len(machine.gpus), "GPU")
    if machine.gpus and visible in ("", "-1"):
        return ""
    if gpus():
        return "" if _torch_has_cuda() else f"this machine has {count}, but the installed torch was built without CUDA"
    if machine.gpus and visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} names none of this machine's {count}"
    if machine.gpus:
        return "MIG is on for this machine's GPUs, but no GPU instance exists: nvidia-smi mig -lgi"
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
    return ask_driver() or GpuInventory(gpus=tuple(Gpu(uuid=path.name) for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()))


def _chosen(visible: str, machine: Sequence[Gpu]) -> list[str]:
    """Return the valid names in CUDA_VISIBLE_DEVICES, by CUDA's rules.

    A name is a number (text after its digits is ignored), a UUID or the beginning of one. The first invalid name ends the
    list. A repeated name leaves no GPU at all. Of a GPU with MIG a process sees one MIG device, and nothing else.
    """
    uuids = [gpu.uuid for gpu in machine]
    mig_uuids = [uuid for gpu in machine for uuid in gpu.mig or ()]
    chosen: dict[int, str] = {}  # index -> name
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG-"):
            return [*chosen.values()] or ([name] if _only(mig_uuids, name) >= 0 else [])
        number = re.match(r"\+?\d+", name)
        index = int(number[0]) if number else _only(uuids, name) if name.startswith("GPU-") else -1
        if index < 0 or index >= len(machine):
            break
        if machine[index].mig is not None:
            return [*chosen.values()] or ([name] if machine[index].mig else [])
        if index in chosen:
            return []
        chosen[index] = name
    return [*chosen.values()]


def _only(uuids: Sequence[str], beginning: str) -> int:
    """Return the index of the only UUID that begins so; -1: none does, or several do."""
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(beginning)]
    return matches[0] if len(matches) == 1 else -1


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
            uuid, name = _text(library.nvmlDeviceGetUUID, handle), _text(library.nvmlDeviceGetName, handle)
            gpus.append(Gpu(uuid=uuid, name=name, mig=_mig_uuids(library, handle)))
    return GpuInventory(gpus=tuple(gpus), driver=_text(library.nvmlSystemGetDriverVersion), problem="; ".join(problems))


def _mig_uuids(library: Any, gpu: ctypes.c_void_p) -> tuple[str, ...] | None:
    mode, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetMigMode(gpu, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
        return None  # off, or a GPU that has no such mode
    library.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most))
    uuids = []
    for index in range(most.value):
        device = ctypes.c_void_p()
        if not library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(device)):  # else there is none with this index
            uuids.append(_text(library.nvmlDeviceGetUUID, device))
    return tuple(uuids)


def _text(read: Callable[..., int], *arguments: Any) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    read(*arguments, text, _TEXT_BYTES)
    return text.value.decode()
