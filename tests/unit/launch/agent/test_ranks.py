"""Which environment a rank can be forked for."""

from __future__ import annotations

import pytest

from ddp_train.launch.agent.ranks import fits


@pytest.mark.parametrize(
    ("environment", "is_fit"),
    [
        ({}, True),
        ({"NCCL_DEBUG": "INFO", "DDP_TRAIN_JOB": "{}", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"OMP_NUM_THREADS": "7"}, True),
        ({"OMP_NUM_THREADS": "7,2"}, False),
        ({"LD_PRELOAD": "libjemalloc.so"}, False),
        ({"PYTHONPATH": "/code"}, False),
        ({"MINE": "1"}, False),
    ],
)
def test_what_is_read_while_loading_needs_a_fresh_interpreter(environment: dict[str, str], is_fit: bool) -> None:
    loaded_with = {"HOME": "/home/me", "OMP_NUM_THREADS": "1"}
    assert fits({**loaded_with, **environment}, loaded_with) == is_fit
    assert not fits({"OMP_NUM_THREADS": "1"}, loaded_with)
