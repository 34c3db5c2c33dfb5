"""The lines of a run for people: plain ones, and those that move on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
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
    console = Console(total_steps=100, step=0, phases=Phases())
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


class Screen:
    """A terminal of 30 lines, and what was written to it so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 120) -> None:
        self.ours, self.theirs = os.openpty()
        os.set_blocking(self.ours, False)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.raw = ""
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(console_module, "_REDRAW_S", 0.01)
        monkeypatch.setattr(console_module, "_NOTES_EVERY_S", 0.01)

    def shows(self, text: str) -> bool:
        with suppress(BlockingIOError):
            self.raw += os.read(self.ours, 1 << 16).decode()
        return text in re.sub(r"\x1b(\[[^a-zA-Z]*[a-zA-Z]|[78])", "", self.raw)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


def test_the_lines_on_a_terminal_move_with_the_rank_and_show_the_epoch_and_that_it_evaluates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    screen = Screen(monkeypatch)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(sys, "stdout", Terminal(screen.theirs, owns=False, log=log))
    phases, saved = Phases(), ["saved    step 5"]
    console = Console(total_steps=40, step=0, phases=phases, epoch=0.0, steps_per_epoch=20, notes=lambda: saved)
    wait_for(lambda: screen.shows("0/40  epoch 0.00/2"))
    assert "\x1b[1;23r" in screen.raw  # the lines above the last seven scroll
    wait_for(lambda: screen.shows("saved    step 5"))
    phases.enter(Phase.STEP, 7)
    wait_for(lambda: screen.shows(" 7/40  epoch 0.35/2"))
    phases.enter(Phase.EVALUATION, 10)
    wait_for(lambda: screen.shows("10/40  epoch 0.50/2"))
    wait_for(lambda: screen.shows("evaluating 0:00"))
    print("a word of the user")
    wait_for(lambda: screen.shows("a word of the user"))
    console.write(record(10, "eval", accuracy=0.5))
    wait_for(lambda: screen.shows("step 10/40  epoch 1.00  eval   accuracy 0.5"))
    phases.enter(Phase.END, 40)
    console.close()
    wait_for(lambda: screen.shows("40/40  epoch 2.00/2"))
    assert screen.raw.rindex("\x1b[r") > screen.raw.rindex("\x1b[1;23r")  # the whole terminal scrolls again
    assert sys.stdout.isatty()
    screen.close()
    os.close(log)
    assert (tmp_path / "log").read_text() == "a word of the user\n"


def test_loss_its_curve_learning_rate_and_data_wait_are_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setattr(sys, "stdout", Terminal(screen.theirs, owns=False))
    console = Console(total_steps=400, step=0, phases=Phases(), epoch=0.0, steps_per_epoch=20)
    for step, loss in enumerate((3.0, 2.0, float("nan"), 1.5), 1):
        console.write(record(step, loss=loss, lr=0.1, step_ms=10.0, data_wait_ms=2.5))
    wait_for(lambda: screen.shows("train    █▃x▁  loss 1.5  lr 0.1  data wait 25%"))
    for step in range(5, 200):
        console.write(record(step, loss=400.0 - step))
    wait_for(lambda: screen.shows("loss 201"))
    newest = re.findall(r"train    (\S+)  loss 201", screen.raw)[-1]
    assert 20 <= len(newest) <= 40 and newest[-1] < newest[-10], "the curve of all records is as wide as that of few"
    console.close()
    screen.close()


def test_a_terminal_that_can_move_nothing_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Terminal(screen.theirs, owns=False))
    console = Console(total_steps=40, step=0, phases=Phases())
    console.write(record(7, loss=1.5))
    console.close()
    wait_for(lambda: screen.shows("step  7/40  epoch 0.70  train  loss 1.5"))
    assert "\x1b" not in screen.raw
    screen.close()
