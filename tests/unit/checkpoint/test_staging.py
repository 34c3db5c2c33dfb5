"""The copy of a share in pinned memory."""

from __future__ import annotations

import mmap
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.checkpoint.staging import StagingBuffer
from tests.unit.sharded_tensors import example, rank_of, sharded_among


class FakeCuda:
    """Stands for CUDA's runtime and a stream, and notes what memory is registered."""

    def __init__(self, *, error: int = 0) -> None:
        self.error, self.sizes, self.now, self.were_there = error, list[int](), dict[int, int](), list[bool]()
        self.threads = list[str]()  # which have registered it

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        self.sizes.append(size)
        self.threads.append(threading.current_thread().name)
        if not self.error:
            self.now[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.now[address]
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        self.were_there.append(any(int(start, 16) <= address < int(stop, 16) for start, stop in maps))
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self  # of a stream


def buffer_on_a_gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> StagingBuffer:
    for name in ("cudart", "Stream", "current_stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return StagingBuffer(torch.device("cuda"))


def test_pinned_memory_is_as_large_as_the_share_and_given_back_before_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    buffer = buffer_on_a_gpu(monkeypatch, fake)
    for numel in (1_200_000, 1_100_000, 3_000_000):  # times four bytes; a power of two would be 8 and 16 MiB
        weights = torch.arange(float(numel))
        staged = buffer.copy_state({"model": {"weights": weights}}, {}, rank=0, size=1)
        assert next(values for piece, values in staged.copies if piece.dtype is torch.float32).equal(weights)
        assert list(fake.now.values()) == fake.sizes[-1:]
        assert 0 <= fake.sizes[-1] - 4 * max(numel, 1_200_000) < 4 * max(numel, 1_200_000) / 64 + (1 << 17)
        del staged
    assert len(fake.sizes) == 2  # a smaller state takes what there is
    del buffer
    assert not fake.now
    assert fake.were_there == [True, True]  # the pages, when CUDA forgot them


def test_pinned_memory_is_made_by_a_thread_before_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    buffer = buffer_on_a_gpu(monkeypatch, fake)
    buffer.make_room(4_000_000)
    for _ in range(2):
        weights = torch.rand(1_000_000)
        staged = buffer.copy_state({"model": {"weights": weights}}, {"torch": torch.zeros(5000)}, rank=0, size=1)
        assert next(values for piece, values in staged.copies if piece.leaf.shape == (1_000_000,)).equal(weights)
    assert fake.threads == ["checkpoint memory"]
    buffer.copy_state({"model": {"weights": torch.rand(2_000_000)}}, {}, rank=0, size=1)  # more than was known
    assert fake.threads == ["checkpoint memory", "MainThread"]


def test_memory_that_cannot_be_pinned_serves_as_well(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    buffer = buffer_on_a_gpu(monkeypatch, FakeCuda(error=2))
    staged = buffer.copy_state({"model": {"weights": torch.ones(9)}}, {}, rank=0, size=1)
    assert sum(float(values.sum()) for piece, values in staged.copies if piece.dtype is torch.float32) == 9
    assert "not pinned (CUDA error 2)" in caplog.text


def test_of_a_tensor_that_is_cut_a_rank_copies_the_rows_that_it_has() -> None:
    whole = example(5, 3)
    for rank, replicas, expected in [(1, 1, (6, 12)), (3, 1, None), (3, 2, (12, 15))]:
        with rank_of(rank, 4, replicas=replicas) as mesh:
            tied = sharded_among(mesh, whole)
            staged = StagingBuffer(torch.device("cpu")).copy_state({"model": {"a": tied, "b": tied.detach()}}, {}, rank=rank, size=4)
        (leaf,) = staged.shared
        assert (leaf.shape, leaf.shards) == ((5, 3), 4 // replicas)
        found = [(piece, values) for piece, values in staged.copies if piece.leaf == leaf]
        assert [(piece.start, piece.stop) for piece, _ in found] == ([] if expected is None else [expected])
        assert all(torch.equal(values, whole.reshape(-1)[piece.start : piece.stop]) for piece, values in found)
