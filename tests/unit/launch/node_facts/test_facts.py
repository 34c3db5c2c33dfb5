"""What a machine tells of itself, from a config as it is checked."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.config.cluster import Rendezvous
from ddp_train.launch.node_facts.facts import NodeFacts, collect, interface_problems, taken_by_nccl
from ddp_train.system import devices
from tests.unit.config.clusters import SILENT

HERE = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.0.0.2"], "ib0": [], "docker0": ["172.17.0.1"]}


def told(
    data: dict[str, Any] | None = None, *, tree: dict[str, Any] | None = None, env: dict[str, Any] | None = None, device: str = "cpu"
) -> NodeFacts:
    """Return what this machine tells of a run."""
    cluster = replace(SILENT, device=device, env=env or {})
    config: Any = SimpleNamespace(tree=tree or {}, data=data or {}, cluster=cluster)
    return collect(config, Rendezvous(min_nodes=2, max_nodes=2, node_rank=1, launch_id="l1"), processes=2)


@pytest.fixture(autouse=True)
def stand_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_a_healthy_machine_is_told_quickly_and_survives_a_journey(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(b"1")
    started = time.monotonic()
    facts = told({"_target_": "x.Y", "root": "data", "split": "train", "eval": {"root": "data", "split": "val"}})
    assert time.monotonic() - started < 1.5
    assert facts.problems == []
    assert NodeFacts.from_json(facts.to_json()) == facts
    assert list(facts.data) == ["data.root"]  # which evaluation shares
    found = facts.data["data.root"]
    assert found is not None and found.sizes == {"a.bin": 1}
    assert facts.versions["torch"].startswith("2.")
    assert (facts.device, facts.driver) == ("cpu", "")


def test_keys_of_the_config_come_with_their_values_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "abcdefghijkl")
    tree = {"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "extra": {"api_key": "k", "text": "say abcdefghijkl"}, "faults": [{"rank": 1}]}
    assert told(tree=tree).config == {
        "optimizer.lr": 0.1,
        "optimizer.betas": [0.9, 0.99],
        "extra.api_key": "***",
        "extra.text": "say ***",
        "faults.0.rank": 1,
    }


def test_gpus_are_told_with_their_kind_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ask_driver", lambda: devices.GpuInventory(gpus=("NVIDIA H100",) * 2, driver="570.1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    facts = told(device="cuda", env={"NCCL_SOCKET_IFNAME": "=eth99"})
    assert (facts.device, facts.device_count, facts.driver) == ("NVIDIA H100", 1, "570.1")
    assert facts.problems[0].startswith("NCCL_SOCKET_IFNAME==eth99 leaves no interface with an address")


def test_what_is_no_path_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    facts = told({"split": "train", "url": "https://host/path", "root": None, "path": "missing.txt", "token_dir": "${oc.env:HOME}"})
    assert facts.data == {"data.path": None}
    assert facts.problems == []  # it may yet be downloaded


def test_a_machine_names_what_is_wrong_with_itself(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dangling").symlink_to("nowhere")
    facts = told({"root": "data"}, env={"GLOO_SOCKET_IFNAME": "eth99"})
    assert [problem.partition(";")[0] for problem in facts.problems] == [
        "data.root: dangling cannot be read: No such file or directory",
        "GLOO_SOCKET_IFNAME=eth99 names eth99, which does not exist",
    ]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", ["eth0", "eth1"]),
        ("eth", ["eth0", "eth1"]),
        ("eth1,docker", ["eth1", "docker0"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^docker,lo,veth", ["eth0", "eth1"]),
        ("^=eth0,lo", ["eth1", "docker0"]),
        ("ib", []),  # is there, without an address
        ("^e,l,d", []),
    ],
)
def test_which_interfaces_nccl_may_take(wanted: str, taken: list[str]) -> None:
    assert taken_by_nccl(wanted, HERE) == taken


@pytest.mark.parametrize(
    ("environment", "uses_gpu", "said"),
    [
        ({}, True, []),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, True, []),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, False, ["GLOO_SOCKET_IFNAME=eth7 names eth7, which does not exist; this machine has lo, eth0"]),
        ({"GLOO_SOCKET_IFNAME": "eth"}, False, ["names eth, which does not exist"]),  # gloo wants the whole name
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, False, ["names ib0, which has no address"]),
        ({"NCCL_SOCKET_IFNAME": "bond"}, True, ["NCCL_SOCKET_IFNAME=bond leaves no interface with an address"]),
        ({"NCCL_SOCKET_IFNAME": "bond"}, False, []),  # nobody asks it
        ({"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}, True, []),
    ],
)
def test_an_interface_that_is_not_there_is_named(environment: dict[str, str], uses_gpu: bool, said: list[str]) -> None:
    found = list(interface_problems(environment, HERE, uses_gpu=uses_gpu))
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True)), found
