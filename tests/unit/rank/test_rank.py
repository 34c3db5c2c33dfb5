"""Whose fault an error of a collective or of the store is, by its text: as gloo, torch and NCCL write them. When memory is short the part
of the run is named, and what would help there: settings that this run has not taken yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from ddp_train.rank.rank import _advice, _comes_from_a_peer, _part_of
from ddp_train.training.check.memory import is_out_of_memory
from ddp_train.training.train_state import TrainState
from tests.unit.parts import checked, components, trainer

GLOO = "third_party/gloo/gloo/transport/tcp"
NCCL = "NCCL error in: torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.5\n{}\nLast error:\n{}"
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."

A_PEERS = [
    RuntimeError(f"[{GLOO}/pair.cc:547] Connection closed by peer [127.0.0.1]:52011"),
    RuntimeError(f"[{GLOO}/pair.cc:538] Read error [127.0.0.1]:52011: Connection reset by peer"),
    RuntimeError(f"[{GLOO}/pair.cc:311] writev [127.0.0.1]:52011: Broken pipe"),
    RuntimeError(f"[{GLOO}/pair.cc:538] Read error [10.0.0.2]:52011: No route to host"),  # its machine has gone
    RuntimeError(f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError(f"[{GLOO}/pair.cc:460] Application timeout caused pair closure"),
    DistBackendError(f"Gloo connectFullMesh failed with [{GLOO}/pair.cc:144] no error"),
    DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    DistNetworkError("Failed to send, sent 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    DistNetworkError("Connection reset by peer"),
    DistNetworkError("The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."),
    DistStoreError("wait timeout after 300000ms, keys: /process_group/0"),
    DistStoreError("Timed out after 301 seconds waiting for clients. 1/2 clients joined."),
    DistBackendError(
        NCCL.format("remote process exited or there was a network error", REMOTE, "Connection closed by remote peer node1<4444>")
    ),
    DistBackendError(
        NCCL.format("remote process exited or there was a network error", REMOTE, "NET/IB : Got completion from peer with error 12")
    ),
    DistBackendError(NCCL.format("unhandled system error", SYSTEM, "Call to recv from 10.0.0.2<4444> failed : Connection reset by peer")),
    DistBackendError(NCCL.format("unhandled system error", SYSTEM, "Call to connect to 10.0.0.2<4444> failed : No route to host")),
    DistBackendError(
        NCCL.format(
            "remote process exited or there was a network error",
            REMOTE,
            "NET/IB: Got completion from peer 10.0.0.2<4444> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0",
        )
    ),
    DistBackendError(
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE,"
        " NumelIn=1, Timeout(ms)=600000) ran for 600044 milliseconds before timing out."
    ),
    DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE) ran for 600081 milliseconds"
    ),
    DistBackendError("NCCL communicator was aborted on rank 1."),
]
ITS_OWN = [
    RuntimeError(f"[enforce fail at {GLOO}/device.cc:84] ifa != nullptr. Unable to find address for: nosuch0"),
    RuntimeError(f"[{GLOO}/listener.cc:28] rv != -1. -1 vs -1. bind: Address already in use"),
    DistNetworkError(
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE,"
        " message: address already in use"
    ),
    DistBackendError(
        NCCL.format(
            "invalid usage",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        )
    ),
    DistBackendError(NCCL.format("internal error", "ncclInternalError: Internal check failed.", "Bootstrap : no socket interface found")),
    DistBackendError(
        NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 'out of memory'")
    ),
    DistBackendError(
        NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "no CUDA-capable device is detected")
    ),
    DistBackendError(NCCL.format("unhandled system error", SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-x")),
    DistBackendError(
        NCCL.format(
            "unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Failed to CUDA calloc async 608 bytes"
        )
    ),
    DistBackendError(NCCL.format("invalid argument", "ncclInvalidArgument: Invalid value for an argument.", "Invalid config magic: 0x0")),
    DistBackendError(
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC"
        " error encountered"
    ),
    DistBackendError("NCCL communicator was aborted on rank 1.  Original reason for failure was: CUDA error: device-side assert triggered"),
    RuntimeError("ConnectionResetError: [Errno 104] Connection reset by peer"),  # in somebody's data set
    ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
]


@pytest.mark.parametrize("error", A_PEERS, ids=str)
def test_what_says_that_a_peer_is_gone_is_a_peers_fault(error: Exception) -> None:
    assert _comes_from_a_peer(error)


@pytest.mark.parametrize("error", ITS_OWN, ids=str)
def test_what_is_wrong_on_this_rank_is_its_own_fault(error: Exception) -> None:
    assert not _comes_from_a_peer(error)


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
    assert _part_of(raised(where)) == part


def test_settings_are_those_that_the_run_has_not_taken() -> None:
    images = checked("loader.micro_batch_size=32", "trainer.global_batch_size=64", base=[])
    smaller = "loader.micro_batch_size=16 trainer.global_batch_size=64 trainer.grad_accum_steps=null"
    assert _advice(images, "forward").split("; ")[:2] == [smaller, "activation_checkpointing=full"]
    text = ["data=char_text", "data.path=README.md", "model=gpt", "objective=language_modeling"]
    assert _advice(checked(*text, base=[]), "backward").startswith("objective.chunk_tokens=4096; activation_checkpointing=full; loader.")
    taken = [
        *text,
        "objective.chunk_tokens=64",
        "activation_checkpointing=full",
        "loader.micro_batch_size=2",
        "trainer.global_batch_size=2",
    ]
    assert _advice(checked(*taken, base=[]), "backward").startswith("loader.micro_batch_size=1 trainer.global_batch_size=2 ")
    assert _advice(checked("evaluation.batch_size=100", base=[]), "the evaluation").startswith("evaluation.batch_size=50")
    assert _advice(checked("loader.on_device=true", base=[]), "the build of model and data").startswith("loader.on_device=false")
    assert "~callbacks.ema" in _advice(checked("callbacks=ema", base=[]), "the optimizer's step")
    gpu = checked(
        "amp=off", "cluster.device=cuda", "cluster.nodes=2", "cluster.launcher=machines", "cluster.rendezvous_endpoint=a:1", base=[]
    )
    assert _advice(gpu, "forward").startswith("amp=bf16; ")
    for part in ("forward", "backward", "the optimizer's step", "the evaluation", ""):
        assert len(_advice(images, part).split("; ")) == 3
