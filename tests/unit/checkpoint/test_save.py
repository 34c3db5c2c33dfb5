"""Saving in the background: never torn, one at a time, and never a success that is none. Three ranks in one process."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistError, DistNetworkError

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.read import damage_of, newest_good, read_shared
from ddp_train.checkpoint.save import Saver
from ddp_train.distributed.world import alone
from ddp_train.errors import DISK_REFUSES
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import checkpoint_content, start_from
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.checkpoint.states import assert_same_state
from tests.unit.checkpoint_ranks import Ranks
from tests.unit.parts import components, trainer


@pytest.fixture(scope="module")
def trained() -> Components:
    """Give components with optimizer state and BatchNorm's buffers."""
    parts = components("model=mini_resnet", "model.width=4", "optimizer=adamw", "trainer.max_steps=1", base=_FEW)
    trainer(parts).train()
    return parts


_FEW = ["data.num_samples=64", "data.eval=null", "trainer.log_every_steps=1", "~metrics.tensorboard"]


def untrained() -> Components:
    return components("model=mini_resnet", "model.width=4", "optimizer=adamw", "trainer.max_steps=1", "seed=5", base=_FEW)


def tensors_of(parts: Components) -> list[torch.Tensor]:
    state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    return list(codec.encode(state, "")[1].values())


def test_what_changes_after_save_returns_is_not_in_the_checkpoint(
    tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()
    real = tensor_file.write

    def late(*arguments: Any, **options: Any) -> str:
        reached.set()
        go.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(tensor_file, "write", late)
    before = [tensor.clone() for tensor in tensors_of(trained)]
    ranks = Ranks(tmp_path, trained)
    ranks.start(1)
    assert reached.wait(30)
    changed = tensors_of(trained)
    assert len(changed) > 60  # weights, buffers, three per weight of the optimizer
    for tensor in changed:
        tensor.add_(1)
    go.set()
    assert ranks.finish() is None
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)
    other = untrained()
    start_from(tmp_path / "step_00000001", other, TrainState(), alone())
    assert_same_state(other, trained)


@pytest.mark.parametrize("size", [3, 4])
def test_all_shares_are_of_rank_0s_buffers_and_every_rank_goes_on_with_them(tmp_path: Path, size: int) -> None:
    """Each rank has BatchNorm averages of its own after a step, and writes a share of them."""
    each = [untrained() for _ in range(size)]
    for rank, parts in enumerate(each):
        for buffer in parts.model.buffers():
            buffer.fill_(rank + 1)
    ranks = Ranks(tmp_path, each, size=size)
    assert ranks.save(1) is None
    files = [path.read_bytes() for path in sorted((tmp_path / "step_00000001").glob("rank_*"))]
    assert sum(b"running_mean" in content for content in files) > 1  # they are spread over the shares
    loaded = untrained()
    start_from(tmp_path / "step_00000001", loaded, TrainState(), alone())
    for parts in [loaded, *each]:
        assert all((buffer == 1).all() for buffer in parts.model.buffers())


def test_what_nothing_keeps_alike_is_rank_0s_alone(tmp_path: Path) -> None:
    each = [untrained() for _ in range(3)]
    for rank, parts in enumerate(each):
        for name in ("scheduler", "scaler"):
            part, plain = getattr(parts, name), getattr(parts, name).state_dict()
            part.state_dict = lambda rank=rank, plain=plain: {**plain, "table": torch.full((1000,), float(rank)), "number": rank}
    assert Ranks(tmp_path, each).save(1) is None
    state = read_shared(tmp_path / "step_00000001")
    for name in ("scheduler", "scaler"):
        assert (state[name]["table"] == 0).all()
        assert state[name]["number"] == 0


def test_ranks_whose_shares_do_not_fit_together_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    each = [untrained() for _ in range(3)]
    each[2].optimizer.state[next(each[2].model.parameters())]["extra"] = torch.zeros(5)
    assert "rank 2: its tensors differ from rank 0's in optimizer" in Ranks(tmp_path, each).save(1)
    assert list(tmp_path.iterdir()) == []


def test_a_second_save_waits_for_the_first(tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    real, under_way, most = tensor_file.write, [0], [0]

    def counted(*arguments: Any, **options: Any) -> str:
        under_way[0] += 1
        most.append(under_way[0])
        digest = real(*arguments, **options)
        under_way[0] -= 1
        return digest

    monkeypatch.setattr(tensor_file, "write", counted)
    ranks = Ranks(tmp_path, trained, size=1, keep_last=9)
    for step in range(1, 6):
        ranks.start(step)
    assert ranks.finish() is None
    assert max(most) == 1 and len(most) == 1 + 3 * 5  # the rank's file, manifest and mark
    assert all(not damage_of(tmp_path / f"step_{step:08d}") for step in range(1, 6))


def test_who_waits_for_a_slow_disk_moves_as_long_as_the_disk_does(
    tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    saver = Saver(folder=tmp_path, world=alone(), config_hash="abc", on_progress=lambda: moved.append(1))
    real = os.write

    def slow(*arguments: Any) -> int:
        time.sleep(0.02)  # ten times what the main thread waits between two looks
        return real(*arguments)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1 << 15)
    saver.save(checkpoint_content(trained, TrainState(step=1), WindowSums([0.0], [1.0]), alone()))
    assert saver.finish() is None
    num_parts = (tmp_path / "step_00000001/rank_00000.safetensors").stat().st_size >> 15
    assert num_parts > 5
    assert len(moved) >= num_parts - 1


def test_a_store_that_is_gone_is_no_failed_save(tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the loss of a rank or of the agent, and the rank that learns of it here is not to blame."""

    def gone(*arguments: Any) -> None:
        raise DistNetworkError("Connection reset by peer")

    ranks = Ranks(tmp_path, trained)
    assert ranks.save(1) is None
    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.save"], "wait_for", gone)
    ranks.start(2)
    for saver in ranks.savers:
        with pytest.raises(DistError, match="reset by peer"):
            saver.finish()
    assert newest_good(tmp_path) == tmp_path / "step_00000001"


def test_lost_weights_replace_nothing(tmp_path: Path) -> None:
    parts = untrained()
    parts.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # infinity is no loss there
    ranks = Ranks(tmp_path, parts)
    assert ranks.save(1) is None
    name, weight = list(parts.model.named_parameters())[-1]
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight.data.view(-1)[-1] = bad
        assert f"model.{name} has NaN or infinity" in str(ranks.save(2))
    weight.data.zero_()
    parts.model.mask[0] = torch.nan  # type: ignore[index, operator]
    assert "model.mask has NaN or infinity" in str(ranks.save(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_is_there_is_never_written_into(tmp_path: Path, trained: Components) -> None:
    (tmp_path / "step_00000002").mkdir()
    assert Ranks(tmp_path, trained).save(2) == "rank 0: step_00000002 exists already"  # and nothing of the room on the disk
    assert list((tmp_path / "step_00000002").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


class Disk:
    """Makes one of the calls that a save makes of the disk fail, on whichever file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def fail(self, call: str, number: int, *, when: Callable[[str], bool]) -> None:
        """Let `os.CALL` fail when its file, or its descriptor's, has a name that `when` picks."""
        real = getattr(os, call)

        def failing(target: Any, *arguments: Any, **options: Any) -> Any:
            name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            if "step_" in name and when(name):
                raise OSError(number, os.strerror(number))
            return real(target, *arguments, **options)

        self._monkeypatch.setattr(os, call, failing)

    def mend(self) -> None:
        self._monkeypatch.undo()


def in_(part: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(part)


POINTS: dict[str, tuple[str, int, Callable[[str], bool]]] = {
    "mkdir, read-only": ("mkdir", errno.EROFS, lambda name: ".partial" in name),
    "mkdir, full": ("mkdir", errno.ENOSPC, lambda name: ".partial" in name),
    "open of a rank's file, read-only": ("open", errno.EROFS, in_("rank_00001.safetensors")),
    "write of rank 2's file, full": ("write", errno.ENOSPC, in_("rank_00002.safetensors")),
    "write of rank 0's file, I/O error": ("write", errno.EIO, in_("rank_00000.safetensors")),
    "fsync of rank 1's file, I/O error": ("fsync", errno.EIO, in_("rank_00001.safetensors")),
    "write of the manifest, full": ("write", errno.ENOSPC, in_("manifest.json")),
    "fsync of the mark, I/O error": ("fsync", errno.EIO, in_("COMPLETE")),
    "fsync of the folder, I/O error": ("fsync", errno.EIO, lambda name: ".partial" in name.rpartition("/")[2]),
    "write of rank 1's file, limited": ("write", errno.EFBIG, in_("rank_00001.safetensors")),
    "rename, read-only": ("rename", errno.EROFS, lambda name: ".partial" in name),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_disk_that_fails_at_any_point_is_no_success(
    tmp_path: Path, trained: Components, point: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(tmp_path, trained)
    assert ranks.save(1) is None
    call, number, when = POINTS[point]
    disk = Disk(monkeypatch)
    disk.fail(call, number, when=when)
    problem = str(ranks.save(2))
    disk.mend()
    assert os.strerror(number) in problem
    assert ("It needs" in problem) == ("are free" in problem) == (number in DISK_REFUSES)
    assert f"the checkpoint of step 2 was NOT saved; earlier ones are unchanged. {problem}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert newest_good(tmp_path) == tmp_path / "step_00000001"
    assert ranks.save(3) is None  # there is room again
    assert newest_good(tmp_path) == tmp_path / "step_00000003"


def test_a_checkpoint_that_may_be_gone_after_a_power_cut_does_not_count(
    tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step_ones"
    ranks = Ranks(folder, trained)
    disk = Disk(monkeypatch)
    disk.fail("fsync", errno.EIO, when=in_("/step_ones"))
    assert os.strerror(errno.EIO) in str(ranks.save(2))
    assert list(folder.iterdir()) == []


def test_an_old_one_that_cannot_be_removed_does_not_spoil_the_new_one(
    tmp_path: Path, trained: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, trained, keep_last=1)
    assert ranks.save(1) is None
    disk = Disk(monkeypatch)
    disk.fail("rename", errno.EIO, when=in_("step_00000001"))
    assert ranks.save(2) is None
    assert newest_good(tmp_path) == tmp_path / "step_00000002"
