"""Which GPUs a process started now would see, and what is said where there are none; NVIDIA's library is simulated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.rank.summary import opening
from ddp_train.system import devices, nvml

MISMATCH = 18
PART = "MIG-aaaa"


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


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Give the machine a library and a torch that has CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: True)

    def put(library: Any) -> None:
        nvml.ask.cache_clear()
        monkeypatch.setattr(nvml, "_load", lambda: library)

    yield put
    nvml.ask.cache_clear()


FOUR = {"GPU-a1": None, "GPU-a2": None, "GPU-b1": None, "GPU-b2": None}


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("1gpu,2", ["1gpu", "2"]),  # as CUDA reads numbers
        ("0,4,1", ["0"]),  # the first that means nothing ends the list
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),  # SLURM, where no GPU was asked for
        ("0,1,0", []),
        ("GPU-b1,GPU-a1", ["GPU-b1", "GPU-a1"]),
        ("GPU-a1,GPU-b", ["GPU-a1"]),  # the beginning of two
        ("GPU-a1,GPU-c", ["GPU-a1"]),
        ("GPU-a1,GPU-a1", []),
        (PART, []),
    ],
)
def test_cuda_visible_devices_means_what_cuda_makes_of_it(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]
) -> None:
    library = Nvml(FOUR)
    install(library)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus() == seen
    assert not library.is_open


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["GPU-b"]),  # the one that is whole
        ("0", ["0"]),  # its first part
        ("MIG-aa", ["MIG-aa"]),
        (f"{PART},MIG-bbbb", [PART]),  # CUDA shows a process one part
        ("1,0", ["1"]),
        (f"0,{PART}", ["0"]),
        ("2,1", []),  # nobody has made a part of it
    ],
)
def test_of_parted_gpus_a_process_sees_one_part(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]
) -> None:
    install(Nvml({"GPU-a": [PART, "MIG-bbbb"], "GPU-b": None, "GPU-c": []}))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus() == seen
    assert devices.why_none() == "" if seen else "names none of this machine's 3 GPUs" in devices.why_none()


def test_a_machine_without_device_files_has_the_gpus_that_its_driver_shows(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *given: iter(()))  # WSL2, and a machine on which nobody has used a GPU yet
    install(Nvml({"GPU-a": None}))
    assert devices.resolve_device("auto") == "cuda"
    assert devices.processes_per_node(None, "auto") == 1
    assert devices.why_none() == ""


def test_without_the_library_the_device_files_count(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(None)
    files = [Path("/dev/nvidia0"), Path("/dev/nvidia1"), Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(files))
    assert devices.gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert devices.gpus() == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("library", "visible", "why"),
    [
        (Nvml({}, init=MISMATCH), None, "the NVIDIA driver shows no GPU: Driver/library version mismatch"),
        (Nvml({"GPU-a": 15}), None, "the NVIDIA driver shows no GPU: GPU 0: GPU is lost"),
        (Nvml({}), None, "the NVIDIA driver shows no GPU: nvidia-smi may say why"),
        (Nvml({"GPU-a": []}), None, "this machine's GPUs are to be parted (MIG), and no part was made: nvidia-smi mig -lgi"),
        (Nvml(FOUR), "NoDevFiles", "CUDA_VISIBLE_DEVICES=NoDevFiles names none of this machine's 4 GPUs"),
        (Nvml(FOUR), "-1", ""),  # chosen
        (Nvml(FOUR), "", ""),
        (None, None, ""),  # a laptop
    ],
)
def test_a_driver_without_a_usable_gpu_is_told(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, library: Nvml | None, visible: str | None, why: str
) -> None:
    install(library)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.resolve_device("auto") == "cpu"
    assert devices.why_none() == why
    job: Any = SimpleNamespace(
        run_folder=SimpleNamespace(shown=lambda: "there"), config=SimpleNamespace(cluster=SimpleNamespace(device="auto"), batch="8")
    )
    assert (f"warning  no GPU is used: {why} (cluster=cpu: on purpose)\n" in opening(job, alone())) == bool(why)
    job.config.cluster.device = "cpu"
    assert "warning" not in opening(job, alone())


def test_a_torch_without_cuda_on_a_machine_with_gpus_is_told(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Nvml(FOUR))
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert devices.resolve_device("auto") == "cpu"
    assert devices.why_none() == "this machine has 4 GPUs, and the torch that is installed was built without CUDA"
