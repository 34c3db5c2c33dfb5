"""metrics.jsonl: what is written can be read back, also over a resume and a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ddp_train.metrics.jsonl import JsonLines
from tests.unit.metrics.records import record


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
