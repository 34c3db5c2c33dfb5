"""The lines of a run for people: plain ones, and one that moves on a terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_train.metrics import console as console_module
from ddp_train.metrics.console import Console
from ddp_train.system.phase import Phase, Phases
from ddp_train.system.terminal import Terminal
from tests.conftest import wait_for
from tests.unit.metrics.records import record


def test_without_a_terminal_the_console_writes_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total_steps=100)
    console.write(record(50, loss=1.2345678, samples_per_s=1234.5, lr=0.1))
    console.write(record(50, "eval", accuracy=0.5))
    console.close()
    train, evaluation = capsys.readouterr().out.splitlines()
    assert train.startswith("step  50/100  epoch 5.00  train  loss 1.235  1,234 samples/s")
    assert train.endswith("left")
    assert evaluation == "step  50/100  epoch 5.00  eval   accuracy 0.5"
    assert "\x1b" not in train + evaluation
    console.write(
        record(50, samples_per_s=10.0, tokens_per_s=5120.4, tokens_per_s_per_device=2560.2, mfu=0.4123, **{"device/memory_gib": 3.5})
    )
    assert "  5,120 tokens/s  MFU 41.2%  3.5 GiB  " in capsys.readouterr().out


def test_the_line_on_a_terminal_moves_with_the_rank_shows_the_epoch_and_that_it_evaluates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    shown = ""

    def shows(text: str) -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(ours, 1 << 16).decode()
        return text in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown)

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal(theirs, owns=False, log=log))
    monkeypatch.setattr(console_module, "_REDRAW_S", 0.01)
    phases = Phases()
    console = Console(total_steps=40, step=0, phases=phases, epoch=0.0, steps_per_epoch=20)
    wait_for(lambda: shows("0/40 epoch 0.00/2"))

    def goes_on(phase: Phase, step: int, text: str) -> bool:
        phases.enter(phase, step)
        return shows(text)

    wait_for(lambda: goes_on(Phase.STEP, 7, " 7/40 epoch 0.35/2"))
    wait_for(lambda: goes_on(Phase.EVALUATION, 10, "10/40 epoch 0.50/2"))
    assert shows("evaluating 0:00")
    print("a word of the user")
    assert shows("a word of the user")
    console.write(record(10, "eval", accuracy=0.5))
    time.sleep(0.1)
    shows("")
    shown = ""
    time.sleep(0.1)
    assert not shows("epoch")  # who stands still draws nothing: another rank's failure may stand there
    phases.enter(Phase.END, 40)
    console.close()
    assert shows("40/40 epoch 2.00/2")
    assert sys.stdout.isatty()
    for descriptor in (ours, theirs, log):
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "a word of the user\n"


@pytest.mark.parametrize(("columns", "has_room"), [(160, True), (70, False)])
def test_learning_rate_and_data_wait_are_on_the_line_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, columns: int, has_room: bool
) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", f"{columns}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal(theirs, owns=False))
    console = Console(total_steps=40, step=0, epoch=0.0, steps_per_epoch=20)
    console.write(record(7, loss=1.5, lr=0.1, step_ms=10.0, data_wait_ms=2.5))
    console.close()
    shown = ""
    while select.select([ours], [], [], 0.5)[0]:  # a terminal gives what it has so far
        shown += os.read(ours, 1 << 16).decode()
    assert "loss 1.5" in shown and ("lr 0.1  data wait 25%" in shown) == has_room
    os.close(theirs)
    os.close(ours)
