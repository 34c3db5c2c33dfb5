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
