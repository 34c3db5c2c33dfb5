"""The line on memory after the first step, and the warning where little is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_train.distributed.world import World, alone
from ddp_train.training.check.memory import parts_of, print_memory_use
from ddp_train.training.train_state import TrainState
from tests.unit.parts import components, trainer

MIB = 2**20


def test_parts_are_what_they_take() -> None:
    parts = components("optimizer=adamw")
    trainer(parts, TrainState()).train()
    weights = sum(parameter.nbytes for parameter in parts.model.parameters())
    found = parts_of(parts)
    assert found["parameters"] == weights + sum(buffer.nbytes for buffer in parts.model.buffers())
    assert found["gradients"] == weights
    assert 2 * weights <= found["optimizer"] < 2.1 * weights + 1000
    next(parts.model.parameters()).requires_grad_(False)
    assert parts_of(parts)["gradients"] < weights


def test_it_is_told_once_after_the_first_step_of_a_run() -> None:
    told: list[int] = []
    parts, state = components("trainer.max_steps=3"), TrainState()
    trainer(parts, state, after_first_step=lambda: told.append(state.step)).train()
    assert told == [1]


def test_on_a_cpu_the_line_has_the_parts_and_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    print_memory_use(components(), alone())
    said = capsys.readouterr().out
    assert said.startswith("memory   parameters ") and "optimizer 0.0 MiB, the process has " in said
    assert "warning" not in said


@pytest.mark.parametrize(("reserved", "warns"), [(94, False), (96, True)])
def test_a_device_that_is_nearly_full_is_warned_of(
    reserved: int, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 90 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 * MIB))
    parts = components()
    print_memory_use(parts, World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cuda")))
    said = capsys.readouterr().out
    rest = (90 * MIB - sum(parts_of(parts).values())) / MIB
    assert f"activations and all else {rest:.1f} MiB, at most 90.0 MiB at a time" in said
    assert (f"warning  {reserved}% of the 100.0 MiB of rank 0's device" in said) == warns
