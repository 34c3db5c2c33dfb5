"""Deterministic algorithms are asked for, and an operation that has none says what to do."""

from __future__ import annotations

import pytest
import torch

from ddp_train.config.cluster import environment_of
from ddp_train.run_folder import failure
from ddp_train.training.seeding import be_deterministic


def test_a_deterministic_job_refuses_what_is_not() -> None:
    assert environment_of({}, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        be_deterministic()
        assert not torch.backends.cudnn.benchmark
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
    assert failure.from_exception(caught.value, rank=0, step=3).fix.startswith("deterministic=false")
