"""NVIDIA's library, simulated."""

from __future__ import annotations

import ctypes
from typing import Any

MISMATCH = 18
FOUR = [0, 0, 0, 0]


class Nvml:
    """The library.

    Args:
        gpus: for each GPU what `nvmlDeviceGetHandleByIndex_v2` returns: 0, or an error's number.
        init: what `nvmlInit_v2` returns.
    """

    def __init__(self, gpus: list[int], init: int = 0) -> None:
        self._gpus, self._init = gpus, init
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
        handle._obj.value = index + 1
        return self._gpus[index]

    def nvmlDeviceGetName(self, device: Any, text: Any, size: int) -> int:
        assert isinstance(device, ctypes.c_void_p) and device.value is not None
        text.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"570.86.15"
        return 0
