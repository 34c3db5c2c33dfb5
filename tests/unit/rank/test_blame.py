"""Whose fault an error of a collective or of the store is, by its text: as gloo, torch and NCCL write them."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from ddp_train.rank.blame import _comes_from_a_peer

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
