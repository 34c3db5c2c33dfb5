"""Fixtures for what NVIDIA's library says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddp_train.system import devices


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Give the machine a library and a torch that has CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)

    def put(library: Any) -> None:
        devices.ask_driver.cache_clear()
        monkeypatch.setattr(devices, "_load_nvml", lambda: library)

    yield put
    devices.ask_driver.cache_clear()
