"""What a machine finds out about itself and its way to others: two examinations on this one machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.doctor import machine
from ddp_train.doctor.machine import Examination, MachineReport, PeerReport, most_minutes, sums_within_s
from tests.unit.config.clusters import SILENT


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Examination]]:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.chdir(tmp_path)
    config: Any = SimpleNamespace(tree={}, data={}, cluster=replace(SILENT, device="cpu"))
    job: Any = SimpleNamespace(config=config, run_folder=SimpleNamespace(root=tmp_path))
    made = [Examination(job, number=number, count=2, first="127.0.0.1") for number in range(2)]
    yield made
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_two_machines_reach_each_other_and_see_each_others_files(two: list[Examination]) -> None:
    told = [each.examine() for each in two]
    for each in told:
        assert (each.write_error, each.address[0], each.nccl) == ("", "127.0.0.1", [])
        assert each.free_bytes > 0 and each.open_files > 0
        assert MachineReport.from_json(each.to_json()) == each
    addresses = {number: each.address for number, each in enumerate(told)}
    for each in two:
        way = each.probe_peers(addresses)
        assert (way.unreached, way.unseen, way.unresolved, way.gloo) == ({}, [], [], "lo")
        assert PeerReport.from_json(way.to_json()) == way


def test_what_is_not_there_is_told(two: list[Examination], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SHARED_WITHIN_S", 0.0)
    first = two[0].examine()
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    way = two[0].probe_peers({0: first.address, 1: ("127.0.0.1", closed[1])})
    assert way.unseen == [1]
    assert way.unreached == {1: "Connection refused"}
    assert PeerReport.from_json(way.to_json()) == way


def test_a_folder_that_cannot_be_written_is_told(two: list[Examination], tmp_path: Path) -> None:
    two[0]._job = SimpleNamespace(config=two[0]._job.config, run_folder=SimpleNamespace(root=tmp_path / "missing"))  # type: ignore[assignment]
    found = two[0].examine()
    assert (found.write_error, found.free_bytes) == ("No such file or directory", 0)


def test_the_sums_of_more_ranks_are_waited_for_longer_and_slurms_job_for_longer_than_that() -> None:
    assert sums_within_s("cuda", 64, is_full=False) >= 60 + 30  # eight contexts at once, and NCCL over 64 ranks, on a busy machine
    assert sums_within_s("cuda", 512, is_full=False) > 2 * sums_within_s("cuda", 64, is_full=False)
    assert most_minutes("cpu", 2, is_full=False) == 5
    assert 60 * most_minutes("cuda", 512, is_full=True) > sums_within_s("cuda", 512, is_full=True) + 180
