"""Who the others agree with, what machines are called, and when ranks would only wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_train.doctor.examined import blocks_all_reduce, most_minutes, sums_within_s
from tests.unit.doctor.examined import three

GPUS = {"device": "NVIDIA H100", "device_count": 8, "driver": "570.1", "processes": 8}


def test_the_usual_machine_is_one_that_most_agree_with() -> None:
    assert three().usual == 0
    assert three(told={0: {"config": {"a": 1}}}).usual == 1
    assert three(told={0: {"config": {"a": 1}}, 1: {"config": {"a": 2}}, 2: {"config": {"a": 3}}}).usual == 0


def test_machines_of_one_host_are_told_apart_by_their_numbers_and_silent_ones_have_no_other_name() -> None:
    examined = three(told={1: {"nodes": "2"}}, count=4)
    assert [examined.name(number) for number in (0, 3)] == ["node0", "machine 3"]


def test_the_sums_of_more_ranks_are_waited_for_longer_and_slurms_job_for_longer_than_that() -> None:
    assert sums_within_s("cuda", 64, is_full=False) >= 60 + 30  # eight contexts at once, and NCCL over 64 ranks, on a busy machine
    assert sums_within_s("cuda", 512, is_full=False) > 2 * sums_within_s("cuda", 64, is_full=False)
    assert most_minutes("cpu", 2, is_full=False) == 5
    assert 60 * most_minutes("cuda", 512, is_full=True) > sums_within_s("cuda", 512, is_full=True) + 180


@pytest.mark.parametrize(
    "faults",
    [
        {"told": {1: {"problems": ["NCCL_SOCKET_IFNAME=ib leaves no interface with an address"]}}},
        {"ways": {1: {"unreached": {2: "timed out"}}}},
        {"told": {1: {"device": "NVIDIA H100", "device_count": 8}}},
        {"told": {number: {**GPUS, "processes": 9 if number == 2 else 8} for number in range(3)}},
    ],
)
def test_what_a_process_group_would_only_wait_for_is_known_before(faults: dict[str, Any]) -> None:
    assert blocks_all_reduce(three(**faults))
