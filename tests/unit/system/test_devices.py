"""Which GPUs a process started now would see, and what is said where there are none; NVIDIA's library is simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.launch.job import Training
from ddp_train.rank.summary import opening
from ddp_train.system import devices
from tests.unit.system.nvml_library import FOUR, MISMATCH, Nvml


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("0,4,1", ["0"]),  # the first that means nothing ends the list
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),  # SLURM, where no GPU was asked for
        ("GPU-b1,GPU-a1", ["GPU-b1", "GPU-a1"]),
        ("MIG-b1", ["MIG-b1"]),
    ],
)
def test_cuda_visible_devices_is_read_up_to_the_first_invalid_name(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[str]
) -> None:
    library = Nvml(FOUR)
    install(library)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus() == seen
    assert not library.is_open


def test_a_machine_without_device_files_has_the_gpus_that_its_driver_shows(
    install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *given: iter(()))  # WSL2, and a machine on which nobody has used a GPU yet
    install(Nvml([0]))
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


def test_a_torch_without_cuda_on_a_machine_with_gpus_is_told(install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Nvml(FOUR))
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    assert devices.resolve_device("auto") == "cpu"
    assert devices.why_none() == "this machine has 4 GPUs, but the installed torch was built without CUDA"


def test_the_driver_and_the_kinds_of_gpus_are_told(install: Callable[[Any], None]) -> None:
    install(Nvml(FOUR))
    machine = devices.ask_driver()
    assert machine is not None and machine.driver == "570.86.15"
    assert machine.gpus == ("NVIDIA H100 80GB HBM3",) * 4


@pytest.mark.parametrize(
    ("library", "visible", "why"),
    [
        (Nvml([], init=MISMATCH), None, "the NVIDIA driver shows no GPU: Driver/library version mismatch"),
        (Nvml([15]), None, "the NVIDIA driver shows no GPU: GPU 0: GPU is lost"),
        (Nvml([]), None, "the NVIDIA driver shows no GPU: see nvidia-smi"),
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
        work=Training(),
        run_folder=SimpleNamespace(as_typed=lambda: "there"),
        config=SimpleNamespace(cluster=SimpleNamespace(device="auto", env={}), batch="8", batch_notes=list, left_out=[]),
    )
    assert (f"warning  no GPU is used: {why} (cluster=cpu if that is intended)\n" in opening(job, alone())) == bool(why)
    job.config.cluster.device = "cpu"
    assert "warning" not in opening(job, alone())
