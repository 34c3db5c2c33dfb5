"""Every fault that the doctor knows is named with its host and with advice, and healthy machines have none."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from ddp_train.doctor.problems import ClusterReport, blocks_all_reduce, problems
from ddp_train.launch.node_facts.file_list import FileList
from tests.unit.doctor.examined import three
from tests.unit.launch.node_facts.machines import DATA, HASHES, facts

LOST = {"data": {"data.root": None}}
GPUS = {"device": "NVIDIA H100", "device_count": 8, "driver": "570.1", "processes": 8}


def said(examined: ClusterReport) -> list[tuple[str, str]]:
    """Return host and text of each problem; each has an advice."""
    found = problems(examined)
    assert all(problem.fix for problem in found)
    return [(problem.key, problem.happened) for problem in found]


def test_healthy_machines_are_fit() -> None:
    assert problems(three()) == []
    assert not blocks_all_reduce(three())
    gpus = {number: dict(GPUS, processes=1) for number in range(3)}
    assert problems(three(told=gpus, measurements={number: {"device": f"cuda:{number}"} for number in range(3)})) == []


@pytest.mark.parametrize(
    ("faults", "what"),
    [
        ({"told": {2: {"config": {"optimizer.lr": 0.5}}}}, "optimizer.lr: 0.5 on node2, 0.1 on node0"),
        (
            {"told": {2: {"source": FileList(sizes={}, hashes={**HASHES, "mine.py": "6" * 16}, listed_by="git", is_whole=True)}}},
            "code: mine.py: 66666666 on node2, 22222222 on node0",
        ),
        (
            {"told": {2: {"data": {"data.root": replace(DATA, hashes={"a.bin": "5" * 16})}}}},
            "data.root: a.bin has the same size but different content",
        ),
        ({"told": {2: LOST}}, "data.root: is missing on node2, exists on node0"),
        ({"told": {2: {"versions": {"python": "3.11.2", "torch": "2.12", "ddp_train": "1"}}}}, "version of torch: '2.12' on node2"),
        ({"told": {2: {"problems": ["GLOO_SOCKET_IFNAME=ib7 names ib7, which does not exist"]}}}, "GLOO_SOCKET_IFNAME=ib7 names ib7"),
        ({"told": {2: {"uid": 7}}}, "runs as user 7, the others as 1000"),
        ({"clocks": {0: 0.0, 1: 0.0, 2: 60.0}}, "its clock is 60.0 s ahead of the others'"),
        ({"clocks": {0: 0.0, 1: 0.0, 2: -60.0}}, "its clock is 60.0 s behind the others'"),
        ({"machines": {2: {"write_error": "Read-only file system"}}}, "cannot write into outputs/x: Read-only file system"),
        ({"machines": {2: {"free_bytes": 5 << 20}}}, "5 MiB are free on the disk of outputs/x"),
        ({"peers": {0: {"unseen": (2,)}, 1: {"unseen": (2,)}, 2: {"unseen": (0, 1)}}}, "does not share outputs/x with the others"),
        ({"machines": {2: {"shared_memory_bytes": 64 << 20}}}, "/dev/shm has 64 MiB"),
        ({"machines": {2: {"shared_memory_bytes": None}}}, "there is no /dev/shm"),
        ({"machines": {2: {"open_files": 256}}}, "a process may have 256 open files"),
        ({"machines": {2: {"locked_bytes": 8 << 20, "adapters": {"mlx5_0": "ACTIVE"}}}}, "a process may lock 8 MiB"),
        ({"peers": {2: {"unresolved": ("node0",)}}}, "this machine cannot resolve the name node0"),
        ({"peers": {2: {"gloo": "lo"}}}, "gloo uses the loopback interface"),
        (
            {"peers": {0: {"unreached": {2: "timed out"}}, 1: {"unreached": {2: "timed out"}}}},
            "cannot be reached at 10.0.0.1:4000 from node0, node1: timed out",
        ),
        ({"machines": {2: {"network": "IB"}}}, "NCCL_NET=IB, but no InfiniBand adapter is active (there is none)"),
        ({"told": {2: {"device": "NVIDIA A100", "device_count": 8, "driver": ""}}}, "has NVIDIA A100, the others have cpu"),
        ({"measurements": {2: {"wrong": "the sum has 3 where 4 is right"}}}, "all-reduce on rank 2: the sum has 3 where 4 is right"),
        (
            {"measurements": {number: {"matmul_tflops": 0.01 if number == 2 else 0.1} for number in range(3)}},
            "rank 2 multiplies matrices at 0.01 TFLOP/s, the others at 0.1",
        ),
    ],
)
def test_a_fault_is_named_with_its_host(faults: dict[str, Any], what: str) -> None:
    found = said(three(**faults))
    assert found[0][0] == "node2"
    assert what in found[0][1], found
    assert {host for host, _ in found} == {"node2"}  # and nobody else


def test_gpus_that_are_fewer_than_their_processes_or_than_elsewhere_are_named() -> None:
    told = {0: dict(GPUS), 1: {**GPUS, "device_count": 7}, 2: {**GPUS, "device_count": 7, "processes": 7, "driver": "560.2"}}
    assert said(three(told=told, processes=23, measurements=None)) == [
        ("node1", "8 processes need a GPU each; it has 7"),
        ("node2", "has the NVIDIA driver 560.2, the others have 570.1"),
        ("node0", "has 8 GPUs, the others have 7"),
    ]


def test_the_odd_one_out_is_named_although_it_is_the_first() -> None:
    assert [host for host, _ in said(three(told={0: {"config": {"optimizer.lr": 0.5}}}))] == ["node0"]
    assert [host for host, _ in said(three(clocks={0: 0.0, 1: -60.0, 2: -59.9}))] == ["node0"]


def test_the_odd_ones_of_many_are_found_in_no_time() -> None:
    three_of_them = three()
    many = {
        number: replace(
            three_of_them.machines[0], facts=facts(f"node{number}", node_rank=number, processes=1, config={"a": number in (0, 7)})
        )
        for number in range(500)
    }
    started = time.monotonic()
    examined = replace(three_of_them, count=500, processes=500, machines=many, peers={}, clocks={}, measurements=None)
    assert [host for host, _ in said(examined)] == ["node0", "node7"]
    assert time.monotonic() - started < 3


def test_data_that_is_nowhere_is_missed_unless_it_is_downloaded() -> None:
    told = dict.fromkeys(range(3), LOST)
    assert said(three(told=told)) == [("node0, node1, node2", "data.root: this path does not exist")]
    assert said(three(told=told, downloads=True)) == []


def test_who_is_silent_is_named_and_no_all_reduce_is_tried_with_it() -> None:
    examined = three()
    lost = replace(examined, machines={0: examined.machines[0], 1: examined.machines[1]}, measurements=None)
    assert said(lost) == [("machine 2", "sent no report")]
    assert blocks_all_reduce(lost)
    assert problems(replace(lost, machines={}, peers={}))[2].key == "machine 2"


def test_ranks_that_do_not_come_to_the_sums_are_counted() -> None:
    examined = three()
    assert examined.measurements is not None
    found = said(replace(examined, measurements={0: examined.measurements[0]}))
    assert found == [(f"node{rank}", f"the all-reduce did not end on rank {rank}") for rank in (1, 2)]
    assert said(replace(examined, measurements={})) == [("between the machines", "the all-reduce did not end on any rank")]


def test_the_usual_machine_is_one_that_most_agree_with() -> None:
    assert three().usual == 0
    assert three(told={0: {"config": {"a": 1}}}).usual == 1
    assert three(told={0: {"config": {"a": 1}}, 1: {"config": {"a": 2}}, 2: {"config": {"a": 3}}}).usual == 0


def test_machines_of_one_host_are_told_apart_by_their_numbers_and_silent_ones_have_no_other_name() -> None:
    examined = three(told={1: {"nodes": "2"}}, count=4)
    assert [examined.name(number) for number in (0, 3)] == ["node0", "machine 3"]


@pytest.mark.parametrize(
    "faults",
    [
        {"told": {1: {"problems": ["NCCL_SOCKET_IFNAME=ib leaves no interface with an address"]}}},
        {"peers": {1: {"unreached": {2: "timed out"}}}},
        {"told": {1: {"device": "NVIDIA H100", "device_count": 8}}},
        {"told": {number: {**GPUS, "processes": 9 if number == 2 else 8} for number in range(3)}},
    ],
)
def test_what_a_process_group_would_only_wait_for_is_known_before(faults: dict[str, Any]) -> None:
    assert blocks_all_reduce(three(**faults))
