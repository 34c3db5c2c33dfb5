"""NVIDIA's library, simulated."""

from __future__ import annotations

import ctypes
from typing import Any

MISMATCH = 18
PART = "MIG-aaaa"
FOUR = {"GPU-a1": None, "GPU-a2": None, "GPU-b1": None, "GPU-b2": None}


class Nvml:
    """The library, for GPUs given as NVML has them.

    Args:
        gpus: UUID -> the UUIDs of its parts, None: no parts; an error's number in its stead.
        init: what `nvmlInit_v2` returns.
    """

    def __init__(self, gpus: dict[str, Any], init: int = 0) -> None:
        self._gpus, self._init = list(gpus.items()), init
        self._devices = [*gpus, *(part for parts in gpus.values() if isinstance(parts, list) for part in parts)]
        self.is_open = False
        self.nvmlErrorString = lambda code: {MISMATCH: b"Driver/library version mismatch", 15: b"GPU is lost"}[code]

    def nvmlInit_v2(self) -> int:
        self.is_open = self._init == 0
        return self._init

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        uuid, parts = self._gpus[index]
        handle._obj.value = self._devices.index(uuid) + 1
        return parts if isinstance(parts, int) else 0

    def nvmlDeviceGetMigMode(self, gpu: Any, mode: Any, pending: Any) -> int:
        parts = self._gpus[gpu.value - 1][1]
        mode._obj.value = int(parts is not None)
        return 3 if parts is None else 0  # not supported

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Any, most: Any) -> int:
        most._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Any, index: int, part: Any) -> int:
        parts = self._gpus[gpu.value - 1][1]
        if index >= len(parts):
            return 6  # not found
        part._obj.value = self._devices.index(parts[index]) + 1
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: int) -> int:
        assert isinstance(device, ctypes.c_void_p) and device.value is not None
        text.value = self._devices[device.value - 1].encode()
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, size: int) -> int:
        text.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"570.86.15"
        return 0
