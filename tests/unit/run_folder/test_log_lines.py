"""What a rank's log says of its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_train.run_folder import failure, log_lines
from ddp_train.run_folder.paths import RunFolder


def test_the_last_words_of_a_rank_are_those_of_this_attempt(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    run_folder.rank_log(0).write_text(
        "".join(f"12:00 rank 0 INFO {log_lines.ACTIVITY % (os.getpid(), text)}\n" for text in ("in forward", "in backward"))
    )
    pid = os.getpid()
    assert log_lines.last_activities(run_folder, {0: pid, 1: pid}) == {0: "in backward", 1: "logged nothing"}
    assert log_lines.last_activities(run_folder, {0: pid + 1}) == {0: "logged nothing"}


WATCHDOG = """12:00 rank 1 INFO begins (pid 7)
CUDA error: of the attempt before
12:05 rank 1 INFO begins (pid 8)
[rank1]:[E409 05:10:01.930 ProcessGroupNCCL.cpp:818] [Rank 1] Some NCCL operations have failed or timed out.
[rank1]:[E409 05:10:01.931 ProcessGroupNCCL.cpp:1595] [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: {said}
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
frame #2: c10d::ProcessGroupNCCL::Watchdog::run() + 0x120 (0x7fc in /venv/torch/lib/libtorch_cuda.so)
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: {said}
frame #2: c10d::ProcessGroupNCCL::Watchdog::run() + 0x120 (0x7fc in /venv/torch/lib/libtorch_cuda.so)
"""


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE)",
    ],
)
def test_a_rank_that_the_watchdog_of_nccl_ended_is_shown_with_the_reason(tmp_path: Path, said: str) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    run_folder.rank_log(1).write_text(WATCHDOG.format(said=said))
    words = log_lines.native_error(run_folder, 1, 8)
    assert words == said
    found = failure.from_exit(rank=1, pid=8, exit_code=-6, run_folder=run_folder)
    assert found.screen(run_folder).count(said) == 1
    assert ("CUDA_LAUNCH_BLOCKING=1" in found.fix) == said.startswith("CUDA error")
    assert said not in failure.from_exit(rank=1, pid=8, exit_code=-9, run_folder=run_folder).message
    run_folder.rank_log(1).write_text("12:05 rank 1 INFO begins (pid 8)\n")
    assert log_lines.native_error(run_folder, 1, 8) == log_lines.native_error(run_folder, 2, 9) == ""
