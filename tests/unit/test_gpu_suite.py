"""The acceptance suite for GPUs: what it decides by, on recorded facts and a fake `torch.cuda`. Rehearsals show the rest."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmark import loop_overhead
from tests.gpu import parts, test_acceptance, test_compute, test_published
from tests.gpu.judges import SYNCED, Sync, growth, memory_line, nccl_environment, not_obeyed, stray

LOG = """
node7:4711:4711 [3] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>
node7:4711:4711 [3] NCCL INFO NCCL_SOCKET_IFNAME set by environment to lo
NCCL version 2.28.9+cuda13.0
node7:4711:4790 [3] NCCL INFO NCCL_BUFFSIZE set by environment to 2097152.
node7:4711:4790 [3] NCCL INFO NCCL_ALGO set by environment to ^NVLS
node7:4711:4790 [3] NCCL INFO Channel 00/32 : 0 1 2 3
"""


def test_a_wait_in_every_step_is_found_although_it_also_happens_at_logs() -> None:
    hot = [Sync(step, "amp_scaler.py:1 step") for step in range(13, 40)]
    assert [sync.step for sync in stray(hot, every_steps=[10, 15, 25], last=40)] == [
        step for step in range(13, 40) if step % 10 and step % 15 and step % 25
    ]
    at_logs = [Sync(step, "trainer.py:1 _log") for step in (20, 25, 30, 37)]
    assert stray(at_logs, every_steps=[10, 15, 25], last=37) == []
    assert stray([Sync(37, "")], every_steps=[10, 15, 25], last=40) == [Sync(37, "")]


def test_memory_that_grows_by_a_cache_at_each_evaluation_is_found_and_a_settling_one_is_not() -> None:
    cache = 64 << 20
    assert growth([cache * number for number in range(64)], settled_after=16) == 48 * cache
    assert growth([0, cache, 2 * cache, *[2 * cache] * 30, cache], settled_after=16) == 0


def test_what_nccl_says_it_was_given_is_compared_with_the_config() -> None:
    assert nccl_environment(LOG) == {"NCCL_SOCKET_IFNAME": "lo", "NCCL_BUFFSIZE": "2097152", "NCCL_ALGO": "^NVLS"}
    assert not_obeyed({"NCCL_ALGO": "^NVLS", "NCCL_BUFFSIZE": "2097152"}, LOG) == []
    assert not_obeyed({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, LOG) == [
        "NCCL_ALGO: ^NVLS, not Ring",
        "NCCL_PROTO: not read, not Simple",
    ]


def test_what_a_run_says_of_its_memory_is_read_by_part() -> None:
    lasts = "parameters 474.7 MiB, gradients 474.7 MiB, optimizer 949.4 MiB"
    said = f"memory   {lasts}, activations and all else 11.20 GiB, at most 13.05 GiB at a time"
    found = memory_line(f"run      somewhere\nmemory   24 of 24 blocks (Block) are recomputed in backward\n{said}\nstep 1\n")
    assert found["activations and all else"] == round(11.2 * 2**30)
    assert (found["parameters"], found["at most"]) == (round(474.7 * 2**20), round(13.05 * 2**30))


class _OnGpu:
    is_cuda = True


def test_the_recorder_turns_torchs_warnings_on_after_the_warm_up_and_notes_step_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    modes: list[str] = []
    hooks: list[Callable[[], None]] = []  # of all optimizers
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(parts, "register_optimizer_step_post_hook", hooks.append)
    monkeypatch.setattr(parts.log_window, "is_host", parts.log_window.is_host)  # put back afterwards
    model = parts.Synced(image_shape=(3, 8, 8), num_classes=2, width=2)
    monkeypatch.setattr(model, "parameters", lambda: iter([_OnGpu()]))
    with warnings.catch_warnings():
        for step in range(parts.WARM_UP_STEPS + 2):
            assert modes == (["warn"] if step >= parts.WARM_UP_STEPS else [])
            for _ in range(2 if modes else 0):  # each time, not once for a line
                warnings.warn(SYNCED, stacklevel=1)  # as torch does from inside an operation
            hooks[0]()
    notes: list[dict[str, Any]] = [json.loads(line) for line in Path("syncs_3.jsonl").read_text().splitlines()]
    assert [note["step"] for note in notes] == [parts.WARM_UP_STEPS] * 2 + [parts.WARM_UP_STEPS + 1] * 2
    assert all("test_gpu_suite.py" in note["where"].split(" > ")[-1] for note in notes), notes[0]


def test_a_rank_asks_for_too_much_in_the_step_that_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(parts, "register_optimizer_step_post_hook", lambda hook: None)  # it is the process's
    model, images = parts.Greedy(rank=1, step=2, image_shape=(3, 8, 8), num_classes=2, width=2), torch.zeros(1, 3, 8, 8)
    asked: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: asked.append(size))
    model(images)
    assert asked == []
    model._after_step()
    model.eval()(images)
    assert asked == []
    model.train()(images)
    assert asked == [1 << 50]


def test_every_item_says_what_it_must_show_and_none_runs_by_default() -> None:
    modules = (test_acceptance, test_compute, test_published)
    items = [[value for name, value in vars(module).items() if name.startswith("test_")] for module in modules]
    assert [len(each) for each in items] == [20, 9, 3]
    assert all(item.__doc__ for each in items for item in each)
    assert {module.pytestmark.name for module in modules} == {"gpu"}
    options = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not gpu" in options["addopts"]


def test_each_item_is_in_a_group_of_ten_minutes_and_each_name_there_is_an_items() -> None:
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    groups = [group.split(" or ") for group in re.findall(r"-k '([^']+)'", page)]
    names = [name for module in (test_acceptance, test_compute, test_published) for name in vars(module) if name.startswith("test_")]
    assert len(groups) == 12
    assert [name for name in names if not any(part in name for group in groups for part in group)] == []
    assert [part for group in groups for part in group if not any(part in name for name in names)] == []


def test_the_loops_benchmark_has_data_for_as_many_processes_as_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million samples were an epoch of eight processes, and more; the hand-written loop stays inside one."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = loop_overhead.configured(loop_overhead.WORKLOADS["mlp"], steps=43 * 50, device="cpu")
    assert found.tree["data"]["num_samples"] == 43 * 50 * 64 * 8
