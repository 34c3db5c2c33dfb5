"""A window of steps: its means, read from the device once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_train.distributed.world import World, alone
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.record import log_window
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.record.logged import Reduction
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import WindowSums
from tests.unit.parts import components, trainer
from tests.unit.training.ragged import ragged_components


def test_the_recorded_loss_is_the_mean_over_the_steps_of_the_window() -> None:
    every: list[Record] = []
    third: list[Record] = []
    trainer(components("trainer.max_steps=6"), write=every.append).train()
    trainer(components("trainer.max_steps=6"), write=third.append, log_every_steps=3).train()
    losses = [record["loss"] for record in every if record["split"] == "train"]
    assert [record["loss"] for record in third if record["split"] == "train"] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])
    assert [record["step"] for record in third] == [3, 6, 6]
    assert {"loss", "lr", "grad_norm", "samples_per_s", "step_ms", "data_wait_ms", "epoch", "samples", "time"} <= third[0].keys()


def test_a_window_that_begins_again_is_like_a_new_one_however_many_steps_it_had() -> None:
    readings = []
    used, new = (LogWindow(torch.device("cpu"), turns=["first"]) for _ in range(2))
    for window in (used, used, new):
        window.reset()
        for step in range(150):  # more than there is room for at first
            window.begin_step()
            for turn, loss in ((None, -step), ("first", 2 * step)):
                window.add(torch.tensor(float(loss)), turn=turn)
            window.begin_turns(["first"])
            window.end_step(64, samples=64)
        readings.append(window.read(Reduction(alone())))
        assert (window.steps, window.samples) == (150, 150 * 64)
        window.add_data(wait_s=1.0, num_skipped=3)
        window.mark_judged(readings[-1].num_units, skipped=[148, 149])
    assert readings[0] == readings[1] == readings[2]
    assert readings[0].totals == [float(step) for step in range(150)]
    assert readings[0].turn_totals["first"] == [2.0 * step for step in range(150)]
    new.reset()
    assert new.to_saved() == WindowSums(turn_losses={"first": []})


def test_the_wait_for_data_is_that_of_the_rank_that_waits_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Tensor]()
    monkeypatch.setattr(World, "sum", lambda world, values: sent.append(values.clone()) or torch.stack(sent).sum(0))
    for rank, wait_s in ((1, 3.0), (0, 1.0)):
        window, reduction = LogWindow(torch.device("cpu")), Reduction(replace(alone(), rank=rank, size=2))
        window.begin_step()
        window.end_step(1, samples=1)
        window.add_data(wait_s=wait_s, num_skipped=0)
        assert window.read(reduction).data_wait_s == 3.0


def test_a_log_step_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ragged_components("trainer.max_steps=8", "trainer.global_batch_size=2", "loader.on_bad_sample=skip")  # with weights to be read
    reads, reads_of_log_steps, records = list[str](), list[int](), list[Record]()
    monkeypatch.setattr(log_window, "is_host", lambda device: False)  # as on a GPU
    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda tensor, name=name, read=read: reads.append(name) or read(tensor))
    log = Trainer._log

    def counted(*arguments: Any) -> None:
        reads.clear()
        log(*arguments)
        reads_of_log_steps.append(len(reads))

    monkeypatch.setattr(Trainer, "_log", counted)
    trainer(parts, write=records.append, log_every_steps=4, on_nonfinite="skip").train()  # with norms to be read
    assert reads_of_log_steps == [1, 1]
    assert {"loss", "grad_norm", "skipped_samples", "skipped_steps"} <= records[0].keys()
