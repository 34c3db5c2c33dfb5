"""What a process group is opened with, and what ranks find out together; real groups are in tests/distributed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from ddp_train.distributed import world as world_module
from ddp_train.distributed.world import alone, open_world
from ddp_train.errors import UserError
from ddp_train.system import process_env
from tests.unit.training.threads import on_all, thread_worlds


@pytest.mark.parametrize(("size", "given", "found"), [(512, None, None), (513, None, "1"), (4096, "0", "0")])
def test_thousands_of_ranks_connect_only_with_those_they_talk_to(
    size: int, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.setenv(variable, "x")  # put back afterwards
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    if given is not None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", given)
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT")))
    monkeypatch.setattr(world_module, "_reach_out", lambda store: None)
    open_world(HashStore(), 0, size, device="cpu")
    assert seen == [found]


def test_ranks_compare_numbers_without_gathering_them() -> None:
    numbers = [[1, -(2**63), 2**63 - 1, 5], [1, -(2**63), 2**63 - 1, -5], [1, -(2**63), 2**63 - 1, 5]]
    worlds = thread_worlds(3)
    found = on_all(3, lambda rank: worlds[rank].are_alike(torch.tensor(numbers[rank])).tolist())
    assert found == [[True, True, True, False]] * 3
    assert alone().are_alike(torch.tensor([7])).tolist() == [True]
    assert worlds[0].are_alike(torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_for_tests_on_one_gpu_one_rank_has_a_group_and_several_share_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    of_this_machine = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in of_this_machine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: opened.append({"backend": backend, **options}))
    with pytest.raises(UserError, match="runs 2 processes, but torch sees 1 GPUs"):
        open_world(HashStore(), 1, 2, device="cuda")
    monkeypatch.setenv(process_env.ONE_GPU, "shared")
    assert open_world(HashStore(), 1, 2, device="cuda").device == torch.device("cuda", 0)
    assert (opened[0]["backend"], opened[0]["device_id"]) == ("gloo", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not open_world(HashStore(), 0, 1, device="cuda").has_group and len(opened) == 1
    monkeypatch.setenv(process_env.ONE_GPU, "group")
    open_world(HashStore(), 0, 1, device="cuda")
    assert (opened[1]["backend"], opened[1]["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
