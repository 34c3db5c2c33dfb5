"""What a run keeps and what a checkpoint takes is known before training; the line after the first step says what it took.

Where memory is short, the part of the run is named, and settings that would help there and that this run has not taken yet.
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.staging import StagingBuffer
from ddp_train.distributed.world import World, alone
from ddp_train.errors import ConfigError
from ddp_train.training.check import memory
from ddp_train.training.check.memory import (
    estimate_checkpoint,
    estimate_share,
    is_out_of_memory,
    memory_by_part,
    part_short_of_memory,
    print_memory_use,
    settings_for_less_memory,
)
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import KeptWeights, checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.parts import checked, components, saved, trainer

MIB = 2**20
TOO_MUCH = 1 << 50


def test_parts_are_what_they_take() -> None:
    parts = components("optimizer=adamw")
    trainer(parts, TrainState()).train()
    weights = sum(parameter.nbytes for parameter in parts.model.parameters())
    found = memory_by_part(parts, num_ranks=1)
    assert found["parameters"] == weights + sum(buffer.nbytes for buffer in parts.model.buffers())
    assert found["gradients"] == weights
    assert 2 * weights <= found["optimizer"] < 2.1 * weights + 1000
    next(parts.model.parameters()).requires_grad_(False)
    assert memory_by_part(parts, num_ranks=1)["gradients"] < weights


def test_it_is_told_once_after_the_first_step_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    parts, state = components("trainer.max_steps=3"), TrainState()
    monkeypatch.setattr(memory, "print_memory_use", lambda components, world: told.append(state.step))
    trainer(parts, state).train()
    assert told == [1]


def test_on_a_cpu_the_line_has_the_parts_and_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    print_memory_use(components(), alone())
    said = capsys.readouterr().out
    assert re.match(r"memory   parameters .*, optimizer 0\.\d MiB, the process has ", said)
    assert "warning" not in said


@pytest.mark.parametrize(("reserved", "warns"), [(94, False), (96, True)])
def test_a_device_that_is_nearly_full_is_warned_of(
    reserved: int, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 90 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * MIB))
    parts = components()
    print_memory_use(parts, World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cuda")))
    said = capsys.readouterr().out
    rest = (90 * MIB - sum(memory_by_part(parts, num_ranks=1).values())) / MIB
    assert f"activations and all else {rest:.1f} MiB, at most 90.0 MiB at a time" in said
    assert (f"warning  {reserved}% of the 100.0 MiB of rank 0's device" in said) == warns


def train(parts: Components) -> Components:
    """Take one step."""
    for parameter in parts.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts.optimizer.step()
    return parts


def test_more_tensors_than_the_files_can_name_are_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("optimizer=adamw")
    num_tensors = len(parts.model.state_dict())
    monkeypatch.setattr(tensor_file, "_MAX_HEADER", 120_000)
    for place in range(400):  # three each in the optimizer
        parts.optimizer.param_groups[0]["params"].append(parameter := torch.nn.Parameter(torch.zeros(1)))
        parts.model.register_parameter(f"p{place}", parameter)
    number = 400 + num_tensors
    said = rf"(?s){number} tensors of the model and {3 * number:,} of the optimizer are too many: .*in one parameter.*more ranks"
    with pytest.raises(ConfigError, match=said):
        estimate_checkpoint(parts, num_ranks=1)
    estimate_checkpoint(parts, num_ranks=2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_is_asked_before_the_first_step_is_what_a_save_does(tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components(f"optimizer={optimizer}", "model.depth=9")
    saved(tmp_path, 1, train(parts))
    parts = components(f"optimizer={optimizer}", "model.depth=9")
    size = int.from_bytes((tmp_path / "step_00000001/rank_00000.safetensors").read_bytes()[:8], "little")
    monkeypatch.setattr(tensor_file, "_MAX_HEADER", size)
    estimate_checkpoint(parts, num_ranks=1)
    monkeypatch.setattr(tensor_file, "_MAX_HEADER", size - 1000)  # a rank's own tensors come besides
    with pytest.raises(ConfigError):
        estimate_checkpoint(parts, num_ranks=1)


class Keeps:
    """A callback with a tensor of its own."""

    def on_start(self, run: object) -> None: ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.zeros(300_000)}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], /) -> None: ...


def test_what_callbacks_carry_counts(tmp_path: Path) -> None:
    parts = components("optimizer=sgd", "model.width=256", "callbacks=ema", "trainer.max_steps=1")
    without = estimate_checkpoint(components("optimizer=sgd", "model.width=256"), num_ranks=1)
    before = estimate_checkpoint(parts, num_ranks=1)
    trainer(parts).train()
    after = sum(path.stat().st_size for path in saved(tmp_path, 1, parts).iterdir())
    assert 0.95 * after < before < 1.2 * after
    assert before - without == sum(parameter.nbytes for parameter in parts.model.parameters())
    assert estimate_checkpoint(parts, num_ranks=1) == pytest.approx(before, rel=0.01)
    parts = replace(parts, callbacks={"keeps": Keeps()})
    assert estimate_checkpoint(parts, num_ranks=1) - without == pytest.approx(1_200_000, abs=1000)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_estimate_is_near_what_is_saved(tmp_path: Path, optimizer: str) -> None:
    parts = components(f"optimizer={optimizer}", "model.width=256")
    before = estimate_checkpoint(parts, num_ranks=1)
    after = sum(path.stat().st_size for path in saved(tmp_path, 1, train(parts)).iterdir())
    assert 0.95 * after < before < 1.2 * after
    assert estimate_checkpoint(parts, num_ranks=1) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("changes", [[], ["callbacks=ema"], ["optimizer=sgd"]])
def test_the_share_of_each_rank_is_about_what_it_copies(changes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("model.width=256", *changes)
    ranks = [replace(alone(), rank=rank, size=3) for rank in range(3)]
    monkeypatch.setattr(World, "gather_to_main", lambda world, value: [value] * 3)
    before = [estimate_share(parts, world) for world in ranks]
    for start in trainer(parts).hooks.when_steps_begin:  # an average of the weights begins
        start()
    saved = checkpoint_content(train(parts), TrainState(), WindowSums(), alone(), KeptWeights())
    for world, share in zip(ranks, before, strict=True):
        buffer = StagingBuffer(torch.device("cpu"))
        copied = buffer.copy_state(saved.shared, saved.own, rank=world.rank, size=3).values.numel()
        assert copied <= share + share // 64 + (1 << 16), "what `make_room` makes"
        assert share < 1.05 * copied + 3 * (1 << 16)


TOO_MUCH = 1 << 50


def test_what_torch_and_python_say_is_known() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",  # the runtime
        "CUDA driver error: out of memory",  # expandable segments
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error: Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",  # a full device has no room for the handle
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # from version 9 on
        "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`. If you keep",  # H200
    ],
)
def test_what_the_libraries_of_a_gpu_say_is_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: misaligned address",
        "CUDA error: uncorrectable ECC error encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        # Of one kernel: a smaller batch would not help.
        "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nError while creating shared memory segment /dev/shm/nccl-x",
        "The NVIDIA driver on your system is too old (found version 11040).",
    ],
)
def test_what_else_goes_wrong_on_a_gpu_is_not_taken_for_it(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


class Greedy(torch.autograd.Function):
    """Takes too much in backward."""

    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return torch.empty(TOO_MUCH, dtype=torch.uint8)


def raised(where: str) -> BaseException:
    """Return the error of a run in which a part takes too much."""
    parts = components("trainer.max_steps=1")
    if where in ("forward", "evaluation"):

        def takes(module: nn.Module, given: Any, output: Tensor) -> None:
            if module.training == (where == "forward"):
                torch.empty(TOO_MUCH, dtype=torch.uint8)

        parts.model.register_forward_hook(takes)
    elif where == "backward":
        parts.model.register_forward_hook(lambda module, given, output: Greedy.apply(output))
    else:
        parts.optimizer.register_step_pre_hook(lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8) and None)
    with pytest.raises(RuntimeError) as found:
        trainer(parts, TrainState()).train()  # with an evaluation at its end
    assert is_out_of_memory(found.value)
    return found.value


@pytest.mark.parametrize(
    ("where", "part"),
    [("forward", "forward"), ("backward", "backward"), ("optimizer", "the optimizer's step"), ("evaluation", "the evaluation")],
)
def test_the_part_is_told_by_the_stack(where: str, part: str) -> None:
    assert part_short_of_memory(raised(where)) == part


def test_settings_are_those_that_the_run_has_not_taken() -> None:
    images = checked("loader.micro_batch_size=32", "trainer.global_batch_size=64", base=[])
    smaller = "loader.micro_batch_size=16 trainer.global_batch_size=64 trainer.grad_accum_steps=null"
    assert settings_for_less_memory(images, "forward").split("; ")[:2] == [smaller, "activation_checkpointing=full"]
    text = ["data=char_text", "data.path=README.md", "model=gpt", "objective=language_modeling"]
    assert settings_for_less_memory(checked(*text, base=[]), "backward").startswith(
        "objective.chunk_tokens=4096; activation_checkpointing=full; loader."
    )
    taken = [
        *text,
        "objective.chunk_tokens=64",
        "activation_checkpointing=full",
        "loader.micro_batch_size=2",
        "trainer.global_batch_size=2",
    ]
    assert settings_for_less_memory(checked(*taken, base=[]), "backward").startswith(
        "loader.micro_batch_size=1 trainer.global_batch_size=2 "
    )
    assert settings_for_less_memory(checked("evaluation.batch_size=100", base=[]), "the evaluation").startswith("evaluation.batch_size=50")
    assert settings_for_less_memory(checked("loader.on_device=true", base=[]), "the build of model and data").startswith(
        "loader.on_device=false"
    )
    assert "~callbacks.ema" in settings_for_less_memory(checked("callbacks=ema", base=[]), "the optimizer's step")
    gpu = checked(
        "amp=off", "cluster.device=cuda", "cluster.nodes=2", "cluster.launcher=machines", "cluster.rendezvous_endpoint=a:1", base=[]
    )
    assert settings_for_less_memory(gpu, "forward").startswith("amp=bf16; ")
    for part in ("forward", "backward", "the optimizer's step", "the evaluation", ""):
        assert len(settings_for_less_memory(images, part).split("; ")) == 3
