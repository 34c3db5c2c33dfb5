"""Which environment a rank can be forked for."""

from __future__ import annotations

from unittest import mock

import pytest

from ddp_train.launch.agent import ranks
from ddp_train.launch.agent.ranks import loads_alike
from ddp_train.system.fork_server import interpreter


@pytest.mark.parametrize(
    ("environment", "is_alike"),
    [
        ({}, True),
        ({"NCCL_DEBUG": "INFO", "DDP_TRAIN_JOB": "/proc/1/fd/3", "CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"OMP_NUM_THREADS": "7"}, True),
        ({"OMP_NUM_THREADS": "7,2"}, False),
        ({"LD_PRELOAD": "libjemalloc.so"}, False),
        ({"PYTHONPATH": "/code"}, False),
        ({"MINE": "1"}, False),
    ],
)
def test_what_is_read_while_loading_needs_a_fresh_interpreter(environment: dict[str, str], is_alike: bool) -> None:
    loaded_with = {"HOME": "/home/me", "OMP_NUM_THREADS": "1"}
    assert loads_alike({**loaded_with, **environment}, loaded_with) == is_alike
    assert not loads_alike({"OMP_NUM_THREADS": "1"}, loaded_with)


def test_the_last_rank_that_is_started_leaves_nothing_that_waits() -> None:
    with mock.patch.object(ranks, "fork_as_server") as forked, mock.patch.object(ranks, "num_threads", return_value=1):
        agent = ranks.Ranks(lambda request: 0, files=[], imports=[], is_forked=True)
        agent.to_start = 2
        for _ in range(2):
            agent.start(*interpreter()[:1], (*interpreter()[1:],), {}, "", "")
        unknown = ranks.Ranks(lambda request: 0, files=[], imports=[], is_forked=True)
        unknown.start(*interpreter()[:1], (*interpreter()[1:],), {}, "", "")
    assert [call.args[0].is_last for call in forked.return_value.start.call_args_list] == [False, True, False]
