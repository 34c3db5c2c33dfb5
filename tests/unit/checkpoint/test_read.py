"""Any number of ranks reads what any number has written: what all have, once for all of them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from ddp_train.checkpoint import tensor_file
from ddp_train.distributed.world import alone
from ddp_train.training.state import saved_state
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.checkpoint.states import assert_same_state
from tests.unit.checkpoint_ranks import Ranks, worlds
from tests.unit.parts import components, trainer


@pytest.mark.parametrize("size", [1, 3, 4])
def test_any_number_of_ranks_writes_the_same_state(tmp_path: Path, size: int) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=2")
    trainer(parts).train()
    assert Ranks(tmp_path, parts, size=size).save(3) is None
    path = tmp_path / "step_00000003"
    sizes = [file.stat().st_size for file in sorted(path.glob("rank_*"))]
    assert len(sizes) == size
    assert max(sizes) - min(sizes) < 16_000  # headers, and what is rank 0's
    other, state = components("optimizer=adamw", "trainer.max_steps=2", "seed=9"), TrainState()
    assert saved_state.start_from(path, other, state, alone()) == (size == 1)
    assert_same_state(other, parts)
    assert state.saved_window == WindowSums([float(sum(range(size)))], [2.0], skipped_samples=sum(range(size)))


def test_ranks_read_what_all_have_once_together_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components("optimizer=adamw", "trainer.max_steps=2")
    trainer(parts).train()
    assert Ranks(tmp_path, parts, size=4).save(3) is None
    path, count, moved = tmp_path / "step_00000003", dict.fromkeys(range(3), 0), list[int]()
    real = tensor_file.read_into

    def counted(descriptor: int, position: int, values: torch.Tensor) -> None:
        count[int(threading.current_thread().name)] += values.numel()
        real(descriptor, position, values)

    monkeypatch.setattr(sys.modules["ddp_train.checkpoint.read"], "_ROUND", 10_000)  # tensors are cut
    monkeypatch.setattr(tensor_file, "read_into", counted)
    others = [components("optimizer=adamw", "trainer.max_steps=2", "seed=9") for _ in range(3)]
    states = [TrainState() for _ in others]
    ranks = worlds(3)  # rank 0 serves the store of all of them, to the end
    threads = [
        threading.Thread(
            target=saved_state.start_from, args=(path, *each), kwargs={"on_progress": lambda: moved.append(1)}, name=str(rank), daemon=True
        )
        for rank, each in enumerate(zip(others, states, ranks, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for other, state in zip(others, states, strict=True):
        assert_same_state(other, parts)
        assert state.step == 3
    size = sum(file.stat().st_size for file in path.glob("rank_*"))
    assert sum(count.values()) < 1.2 * size  # not three times; the plain parts of the ranks' own come besides
    assert max(count.values()) < 0.75 * size
    assert len(moved) > size / 10_000
