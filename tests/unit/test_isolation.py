"""What a job may change is put back, and nothing else is changed by that."""

from __future__ import annotations

import os

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from ddp_train import failure
from ddp_train.cluster import environment_of
from ddp_train.isolation import Baseline
from ddp_train.state import be_deterministic


def test_the_default_device_is_put_back_and_torch_is_not_slower_for_it() -> None:
    baseline = Baseline()
    torch.set_default_device("meta")
    baseline.restore()
    assert torch.get_default_device().type == "cpu"
    assert not _get_current_function_mode_stack()  # a default device, even CPU, is a mode that every call of torch passes through


def test_a_deterministic_job_refuses_what_is_not_and_leaves_the_next_one_as_it_was() -> None:
    baseline = Baseline()
    torch.backends.cudnn.benchmark = True
    os.environ.update(environment_of({"env": {}}, deterministic=True))
    be_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    assert failure.from_exception(caught.value, rank=0, step=3).fix.startswith("deterministic=false")
    baseline.restore()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_what_the_user_says_of_cublas_and_nccl_wins() -> None:
    assert environment_of({"env": {}}, deterministic=True) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}
    environment = environment_of({"env": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}}, deterministic=True)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"}
    environment = environment_of({"env": {}}, deterministic=True, given={"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert environment_of({"env": {}}) == {}
