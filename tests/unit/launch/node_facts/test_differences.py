"""What a machine has otherwise than the first one is named with both hosts and both values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_train.launch.node_facts.differences import clock, differences, fingerprint
from ddp_train.launch.node_facts.file_list import FileList
from tests.unit.launch.node_facts.machines import DATA, HASHES, facts

FIRST = facts(config={**facts().config, "trainer.global_batch_size": 64})


def other(**changes: Any) -> list[str]:
    return differences(FIRST, facts("node1", **{"node_rank": 1, "config": FIRST.config, **changes}))


def test_machines_that_differ_only_in_what_may_differ_agree() -> None:
    config = {**FIRST.config, "cluster.node_rank": 1, "cluster.processes_per_node": 4}
    told = facts("node1", config=config, uid=7, utc=5.0, device="cuda", device_count=8)
    assert fingerprint(told) == fingerprint(FIRST)
    config["trainer.global_batch_size"] = 128
    assert other(config=config, processes=4, uid=7, utc=5.0, device="cuda", device_count=8) == []
    assert len(other(config=config, processes=2)) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"launch_id": "l2", "nodes": "3"}, ["it belongs to another run: l2 on node1, l1 on node0"]),
        ({"spec": "abc"}, ["spec.json: abc on node1, absent on node0"]),
        ({"nodes": "3"}, ["cluster.nodes: 3 on node1, 2 on node0"]),
        ({"config": {**FIRST.config, "optimizer.lr": 0.5}}, ["optimizer.lr: 0.5 on node1, 0.1 on node0"]),
        ({"config": {**FIRST.config, "model.width": 1}}, ["model.width: 1 on node1, absent on node0"]),
        ({"versions": {**FIRST.versions, "torch": "2.12"}}, ["version of torch: '2.12' on node1, '2.13.0' on node0"]),
        ({"data": {"data.root": None}}, ["data.root: is missing on node1, exists on node0"]),
        (
            {"data": {"data.root": replace(DATA, sizes={**DATA.sizes, "a.bin": 11})}},
            ["data.root: a.bin: 11 bytes on node1, 10 bytes on node0"],
        ),
        (
            {"data": {"data.root": replace(DATA, hashes={**DATA.hashes, "a.bin": "5" * 16})}},
            ["data.root: a.bin has the same size but different content: sample 55555555 on node1, 33333333 on node0"],
        ),
        (
            {"data": {"data.root": replace(DATA, sizes={"a.bin": 10, "b": -1, "b/d.bin": 1})}},
            ["data.root: b/c.bin is missing on node1, exists on node0", "data.root: b/d.bin exists on node1, is missing on node0"],
        ),
        (
            {"source": FileList(sizes={}, hashes={**HASHES, "mine.py": "6" * 16}, listed_by="git", is_whole=True)},
            ["code: mine.py: 66666666 on node1, 22222222 on node0"],
        ),
        (
            {"source": FileList(sizes={}, hashes={"ddp_train/errors.py": "1" * 16, "new.py": "7" * 16}, listed_by="git", is_whole=True)},
            ["code: mine.py is missing on node1, exists on node0", "code: new.py exists on node1, is missing on node0"],
        ),
    ],
)
def test_a_difference_is_named(changes: dict[str, Any], said: list[str]) -> None:
    assert other(**changes) == said
    assert fingerprint(facts("node1", **{"config": FIRST.config, **changes})) != fingerprint(FIRST)


def test_what_one_machine_has_not_come_to_look_at_is_no_difference() -> None:
    part = replace(DATA, sizes={"a.bin": 10}, hashes={"a.bin": "3" * 16}, is_whole=False)
    assert other(data={"data.root": part}) == []
    for source in (
        FileList(sizes={}, hashes={"mine.py": HASHES["mine.py"]}, listed_by="git", is_whole=False),
        FileList(sizes={}, hashes={"mine.py": HASHES["mine.py"], "ignored.py": "8" * 16}, listed_by="folder", is_whole=True),
    ):
        assert other(source=source) == []
    assert differences(facts(data={"data.root": None}, config=FIRST.config), FIRST) == []  # the first machine downloads it


def test_many_differences_of_a_kind_are_counted() -> None:
    config = {f"model.a{number}": 1 for number in range(20)} | dict(FIRST.config)
    assert len(other(config=config)) == 9
    assert other(config=config)[-1] == "and 12 more keys"


def test_machines_of_one_name_are_told_apart_by_their_numbers() -> None:
    assert differences(FIRST, facts("node0", node_rank=1, nodes="3", config=FIRST.config)) == [
        "cluster.nodes: 3 on node0 (machine 1), 2 on node0 (machine 0)"
    ]


@pytest.mark.parametrize(
    ("theirs", "round_trip_s", "said"),
    [
        (1000.4, 0.5, ""),
        (1060.5, 0.5, "the clock of node1 is 60.0 s ahead of that of node0"),
        (939.5, 0.5, "the clock of node1 is 60.0 s behind that of node0"),
        (1001.5, 0.0, ""),
        (1002.4, 0.5, ""),
    ],
)
def test_clocks_that_differ_are_named(theirs: float, round_trip_s: float, said: str) -> None:
    assert clock(FIRST, facts("node1", utc=theirs), round_trip_s=round_trip_s) == said
