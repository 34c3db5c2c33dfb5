"""When memory is short the part of the run is named, and what would help there: settings that this run has not taken yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.rank.out_of_memory import advice, part_of
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.train_state import TrainState
from tests.unit.parts import checked, components, trainer

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
    assert part_of(raised(where)) == part


def test_settings_are_those_that_the_run_has_not_taken() -> None:
    images = checked("loader.micro_batch_size=32", "trainer.global_batch_size=64", base=[])
    smaller = "loader.micro_batch_size=16 trainer.global_batch_size=64 trainer.grad_accum_steps=null"
    assert advice(images, "forward").split("; ")[:2] == [smaller, "activation_checkpointing=full"]
    text = ["data=char_text", "data.path=README.md", "model=gpt", "objective=language_modeling"]
    assert advice(checked(*text, base=[]), "backward").startswith("objective.chunk_tokens=4096; activation_checkpointing=full; loader.")
    taken = [
        *text,
        "objective.chunk_tokens=64",
        "activation_checkpointing=full",
        "loader.micro_batch_size=2",
        "trainer.global_batch_size=2",
    ]
    assert advice(checked(*taken, base=[]), "backward").startswith("loader.micro_batch_size=1 trainer.global_batch_size=2 ")
    assert advice(checked("evaluation.batch_size=100", base=[]), "the evaluation").startswith("evaluation.batch_size=50")
    assert advice(checked("loader.on_device=true", base=[]), "the build of model and data").startswith("loader.on_device=false")
    assert "~callbacks.ema" in advice(checked("callbacks=ema", base=[]), "the optimizer's step")
    gpu = checked(
        "amp=off", "cluster.device=cuda", "cluster.nodes=2", "cluster.launcher=machines", "cluster.rendezvous_endpoint=a:1", base=[]
    )
    assert advice(gpu, "forward").startswith("amp=bf16; ")
    for part in ("forward", "backward", "the optimizer's step", "the evaluation", ""):
        assert len(advice(images, part).split("; ")) == 3
