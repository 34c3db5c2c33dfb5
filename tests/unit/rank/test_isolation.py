"""What a job may change is put back, and nothing else is changed by that."""

from __future__ import annotations

import os
from operator import attrgetter

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from ddp_train.config.cluster import environment_of
from ddp_train.rank.isolation import Baseline
from ddp_train.run_folder import failure
from ddp_train.training.seeding import be_deterministic


def test_the_default_device_is_put_back_and_torch_is_not_slower_for_it() -> None:
    baseline = Baseline()
    torch.set_default_device("meta")
    baseline.restore()
    assert torch.get_default_device().type == "cpu"
    assert not _get_current_function_mode_stack()  # a default device, even CPU, is a mode that every call of torch passes through


def test_threads_are_put_back_where_a_job_changed_them_and_not_touched_where_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """To set them takes from MKL the choice of fewer, for good."""
    baseline, before, told = Baseline(), torch.get_num_threads(), list[int]()
    real = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (told.append(count), real(count)))
    baseline.restore()
    assert told == []
    real(before + 1)
    baseline.restore()
    assert (told, torch.get_num_threads()) == ([before], before)


def test_a_deterministic_job_refuses_what_is_not_and_leaves_the_next_one_as_it_was() -> None:
    baseline = Baseline()
    torch.backends.cudnn.benchmark = True
    os.environ.update(environment_of({}, deterministic=True))
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


def in_older_words() -> list[object]:
    backends = torch.backends
    matmul = torch.get_float32_matmul_precision()
    return [backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, matmul]


def in_newer_words() -> list[str]:
    backends = torch.backends
    mine = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn, backends.mkldnn]
    return [
        each.fp32_precision for each in (backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, *mine)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"cudnn.conv": "ieee"},
        {"": "tf32"},
        {"": "tf32", "cudnn": "ieee", "cuda.matmul": "tf32", "mkldnn.matmul": "bf16", "cudnn.rnn": "ieee"},
    ],
)
def test_precision_is_put_back_whichever_way_it_was_set(changes: dict[str, str]) -> None:
    older, newer, baseline = in_older_words(), in_newer_words(), Baseline()
    for name, value in changes.items():
        attrgetter(f"backends.{name}".rstrip("."))(torch).fp32_precision = value
    assert in_newer_words() != newer
    baseline.restore()
    assert (in_older_words(), in_newer_words()) == (older, newer)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False
    baseline.restore()
    assert (in_older_words(), in_newer_words()) == (older, newer)
    torch.backends.fp32_precision = "tf32"  # what follows it followed it before, and does still
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    baseline.restore()


def test_a_precision_that_was_there_before_the_first_job_stays() -> None:
    untouched = Baseline()
    torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision = "tf32", "ieee"
    before = in_newer_words()
    baseline = Baseline()
    assert in_newer_words() == before
    torch.backends.fp32_precision = "ieee"
    baseline.restore()
    assert in_newer_words() == before
    untouched.restore()
