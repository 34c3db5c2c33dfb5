"""Each checkpoint of a run is found once, in the order of the steps, until the run is done."""

from __future__ import annotations

import json
from pathlib import Path

from ddp_train.rank.evaluate_job import CheckpointWatch
from ddp_train.run_folder.result import Result, Status


def save(run: Path, step: int, mark: str = "a") -> Path:
    folder = run / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"facts": {}}))
    (folder / "COMPLETE").write_text(mark)
    return folder


def test_checkpoints_are_found_once_and_again_when_they_are_others(tmp_path: Path) -> None:
    second, first = save(tmp_path, 2), save(tmp_path, 1)
    watch = CheckpointWatch(tmp_path)
    assert [watch.next_checkpoint(), watch.next_checkpoint(), watch.next_checkpoint()] == [(first, False), (second, False), (None, False)]
    save(tmp_path, 1, "b")  # the run went back
    third = save(tmp_path, 3)
    Result(status=Status.COMPLETED, step=3).write(tmp_path / "result.json")
    assert [watch.next_checkpoint(), watch.next_checkpoint(), watch.next_checkpoint()] == [(first, False), (third, False), (None, True)]


def test_what_was_seen_before_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, 1)
    second = save(tmp_path, 2)
    assert CheckpointWatch(tmp_path, seen={1}).next_checkpoint() == (second, False)
