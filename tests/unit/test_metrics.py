"""Writers: what they are given is what can be read back, also over a resume."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ddp_train.job import Job
from ddp_train.metrics import console as console_module
from ddp_train.metrics.console import Console
from ddp_train.metrics.jsonl import JsonLines
from ddp_train.metrics.tensorboard import TensorBoard
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.run_folder.paths import RunFolder
from ddp_train.sweep.folder import Sweep, SweepJob
from ddp_train.system.terminal import Terminal
from tests.conftest import wait_for


def record(step: int, split: str = "train", **values: float) -> dict[str, object]:
    return {"split": split, "step": step, "epoch": step / 10, "samples": step * 32, "time": 0.0, **values}


def test_a_resumed_run_has_no_step_twice_and_none_missing(tmp_path: Path) -> None:
    first = JsonLines(str(tmp_path))
    for step in range(1, 8):
        first.write(record(step, loss=1.0))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # killed inside a line
    second = JsonLines(str(tmp_path), step=5)
    for step in range(6, 9):
        second.write(record(step, loss=2.0))
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(step, 1.0 if step <= 5 else 2.0) for step in range(1, 9)]


def test_lines_wait_while_the_disk_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = JsonLines(str(tmp_path))
    writer.write(record(1))
    real, room = os.write, 10  # bytes

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        writer.write(record(2))
        writer.write(record(3))
    assert capsys.readouterr().out.count("No space left on device") == 1
    writer.write(record(4))
    assert "complete again" in capsys.readouterr().out
    writer.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    writer = JsonLines(str(tmp_path))
    writer.write(record(1, perplexity=float("inf"), loss=float("nan")))
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["perplexity"], line["loss"]) == (None, None)


def test_tensorboard_has_scalars_config_and_hyper_parameters(tmp_path: Path) -> None:
    writer = TensorBoard(str(tmp_path), {"optimizer": {"lr": 0.1}, "name": "x", "trainer": {"max_steps": None}}, {"optimizer.lr": 0.1})
    writer.write(record(5, loss=1.5))
    writer.write(record(5, "eval", accuracy=0.75))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].step == 5
    assert events.Scalars("eval/accuracy")[0].value == 0.75
    assert b"optimizer" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    started = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert set(HParamsPluginData.FromString(started).session_start_info.hparams) == {"optimizer.lr"}


def test_the_jobs_of_a_sweep_can_be_told_apart_in_tensorboard(tmp_path: Path) -> None:
    sweep = Sweep(root=tmp_path, command=[], keys=["optimizer.lr", "model"])
    for number, lr in enumerate(("0.1", "0.2")):
        overrides = ["seed=3", f"optimizer.lr={lr}", "model=mlp"]
        sweep.jobs.append(SweepJob(number=number, folder=str(number), overrides=overrides, identity=lr))
        run = tmp_path / str(number)
        TensorBoard(str(run), {}, run_name=sweep.name(run)).close()
    names = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("events.*")}
    assert names == {"0/tensorboard/optimizer.lr=0.1,model=mlp", "1/tensorboard/optimizer.lr=0.2,model=mlp"}
    TensorBoard(str(tmp_path), {}, run_name="data.root=/a/b").close()
    TensorBoard(str(tmp_path), {}, run_name="é" * 200).close()
    assert (tmp_path / "tensorboard/data.root=_a_b").is_dir()


def test_the_hyper_parameters_are_what_was_typed(tmp_path: Path) -> None:
    typed = ["optimizer.lr=1e-1", "+model.depth=3", "model=mlp", "~metrics.tensorboard", "hydra.run.dir=x", "name=null", "experiment=mine"]
    tree: Any = {"optimizer": {"lr": 0.1, "eps": 1e-8}, "model": {"depth": 3}, "name": None, "seed": 1}
    config: Any = SimpleNamespace(tree=tree)
    job = Job(config=config, run_folder=RunFolder(tmp_path), command=[], overrides=typed)
    expected = {"optimizer.lr": 0.1, "model.depth": 3, "model": "mlp", "name": "null", "experiment": "mine"}
    assert job.hyper_parameters() == expected


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
    tracker = PhaseTracker()
    console = Console(total_steps=40, step=0, tracker=tracker, epoch=0.0, steps_per_epoch=20)
    assert shows("0/40 epoch 0.00/2")

    def goes_on(phase: Phase, step: int, text: str) -> bool:
        tracker.enter(phase, step)
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
    tracker.enter(Phase.END, 40)
    console.close()
    assert shows("40/40 epoch 2.00/2")
    assert sys.stdout.isatty()
    for descriptor in (ours, theirs, log):
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "a word of the user\n"
