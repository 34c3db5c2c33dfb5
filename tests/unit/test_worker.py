"""One rank, before and around its job."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ddp_train import worker
from ddp_train.distributed import World, alone
from ddp_train.isolation import Baseline
from ddp_train.job import Job
from ddp_train.run_dir import RunDir
from tests.unit.parts import checked


def test_a_deterministic_job_is_so_before_its_process_group_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def open_world(*given: Any, **named: Any) -> World:
        found.append(torch.are_deterministic_algorithms_enabled())
        found.append([os.environ.get(name) for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")])
        return alone()

    def nothing(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(begin=nothing, end=nothing, close=nothing)

    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setattr(worker, "open_world", open_world)
    monkeypatch.setattr(worker, "run_job", lambda *given: 0)
    for name in ("Watch", "Stop"):
        monkeypatch.setattr(worker, name, nothing)
    baseline = Baseline()
    try:
        job = Job(config=checked("deterministic=true"), run_dir=RunDir(tmp_path), command=[], overrides=[], in_sweep=True)
        assert worker.Rank(HashStore(), 0, 1).run(job) == 0
    finally:
        baseline.restore()
    assert found == [True, ["^NVLS", ":4096:8"]]
