"""What NVIDIA's library says of parted GPUs, and of a driver without a usable one; the library is simulated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.distributed.world import alone
from ddp_train.rank.summary import opening
from ddp_train.system import devices, nvml
from tests.unit.system.nvml_library import FOUR, MISMATCH, PART, Nvml


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


def test_the_driver_and_the_kinds_of_gpus_are_told(install: Callable[[Any], None]) -> None:
    install(Nvml(FOUR))
    machine = nvml.ask()
    assert machine is not None and machine.driver == "570.86.15"
    assert {gpu.name for gpu in machine.gpus} == {"NVIDIA H100 80GB HBM3"}


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
        task=None,
        run_folder=SimpleNamespace(shown=lambda: "there"),
        config=SimpleNamespace(cluster=SimpleNamespace(device="auto"), batch="8", batch_notes=list, left_out=[]),
    )
    assert (f"warning  no GPU is used: {why} (cluster=cpu: on purpose)\n" in opening(job, alone())) == bool(why)
    job.config.cluster.device = "cpu"
    assert "warning" not in opening(job, alone())
