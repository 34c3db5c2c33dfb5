"""What a failure's report says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from ddp_train.errors import DataError
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status


def test_ranks_that_did_the_same_share_a_line_and_many_lines_are_cut() -> None:
    found = failure.from_exit(rank=3, pid=1, exit_code=-9)
    doing = {rank: "in backward" for rank in range(64) if rank != 3} | {7: "in forward"}
    assert found.with_others(doing).others == ("ranks 0-2, 4-6, 8-63 in backward", "rank 7       in forward")
    many = found.with_others({rank: f"at {rank}" for rank in range(64)}).others
    assert len(many) == 9
    assert many[-1] == "... and 56 more"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "loader.micro_batch_size"),
        (RuntimeError("something else"), ""),
    ],
)
def test_errors_that_are_not_ours_come_with_a_fix_where_one_is_known(error: Exception, fix: str, tmp_path: Path) -> None:
    found = failure.from_exception(error, rank=0, step=1)
    assert fix in found.fix
    assert bool(fix) == bool(found.fix) == ("  fix: " in found.screen(RunFolder(tmp_path)))


@pytest.mark.parametrize(
    ("was_out_of_memory", "said"), [(True, "sent by the kernel's out-of-memory killer"), (None, "often the out-of"), (False, "by SIGKILL")]
)
def test_the_out_of_memory_killer_is_named_where_the_kernel_counts_it(was_out_of_memory: bool | None, said: str) -> None:
    found = failure.from_exit(rank=0, pid=1, exit_code=-9, was_out_of_memory=was_out_of_memory)
    assert found.error == "SIGKILL"
    assert said in found.message
    assert bool(found.fix) == (was_out_of_memory is not False)


def test_a_failure_that_cannot_be_written_raises_nothing_and_is_the_first_where_no_report_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found, run_folder = failure.from_exit(rank=0, pid=1, exit_code=-9), RunFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert found.record(run_folder, seconds=1.0)
    assert not list(tmp_path.iterdir())
    assert found.record(run_folder, seconds=1.0)
    assert not found.record(run_folder, seconds=2.0)
    monkeypatch.setattr(os, "fsync", full)
    assert not found.record(run_folder, seconds=3.0)
    result = run_folder.read_result()
    assert result is not None and (result.status, result.seconds) == (Status.FAILED, 1.0)


def test_the_first_failure_is_kept_and_an_error_for_the_user_has_no_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    error = DataError(key="data.root", happened="files are missing", expected="four files", fix="put them there")
    first, second = (failure.from_exception(error, rank=rank, step=None) for rank in (3, 1))
    assert first.record(folder)
    assert not second.record(folder)
    assert json.loads(folder.failure.read_text())["rank"] == 3
    shown = first.screen(folder)
    assert "rank 3" in shown
    assert "data.root: files are missing\n  expected: four files\n  fix: put them there" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.PREEMPTED, Status.INTERRUPTED])
def test_what_is_lost_after_a_good_end_is_no_failure(tmp_path: Path, status: Status) -> None:
    folder, lost = RunFolder(tmp_path), failure.from_machine(host="node1", ranks=[2, 3], why="is gone")
    ended = Result(status=status, step=3)
    ended.write(folder.result)
    assert folder.has_ended_since(None)
    assert folder.read_result() == ended and not folder.failure.exists()
    assert not folder.has_ended_since(ended)  # it is of an earlier start, and was continued since
    lost.record(folder)
    assert (found := folder.read_result()) is not None and found.status == Status.FAILED


def test_the_last_words_of_a_rank_are_those_of_this_attempt(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    run_folder.logs.mkdir()
    run_folder.rank_log(0).write_text(
        "".join(f"12:00 rank 0 INFO {failure.ACTIVITY % (os.getpid(), text)}\n" for text in ("in forward", "in backward"))
    )
    pid = os.getpid()
    assert failure.last_activities(run_folder, {0: pid, 1: pid}) == {0: "in backward", 1: "logged nothing"}
    assert failure.last_activities(run_folder, {0: pid + 1}) == {0: "logged nothing"}


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
    words = failure.native_error(run_folder, 1, 8)
    assert words == said
    found = failure.from_exit(rank=1, pid=8, exit_code=-6, run_folder=run_folder)
    assert found.screen(run_folder).count(said) == 1
    assert ("CUDA_LAUNCH_BLOCKING=1" in found.fix) == said.startswith("CUDA error")
    assert said not in failure.from_exit(rank=1, pid=8, exit_code=-9, run_folder=run_folder).message
    run_folder.rank_log(1).write_text("12:05 rank 1 INFO begins (pid 8)\n")
    assert failure.native_error(run_folder, 1, 8) == failure.native_error(run_folder, 2, 9) == ""
