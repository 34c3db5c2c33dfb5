"""Each checkpoint of a run is found once, in the order of the steps, until the run is done."""

from __future__ import annotations

from pathlib import Path

from ddp_train.rank.evaluate_job import new_checkpoints
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from tests.unit.parts import manifest


def save(run: Path, step: int, mark: str = "a") -> Path:
    folder = run / f"checkpoints/step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(manifest(step).to_bytes())
    (folder / "COMPLETE").write_text(mark)
    return folder


def test_checkpoints_are_found_once_and_again_when_they_are_others(tmp_path: Path) -> None:
    second, first = save(tmp_path, 2), save(tmp_path, 1)
    watch = new_checkpoints(RunFolder(tmp_path))
    assert [next(watch), next(watch), next(watch)] == [first, second, None]
    save(tmp_path, 1, "b")  # the run went back
    third = save(tmp_path, 3)
    Result(status=Status.COMPLETED, step=3).write(tmp_path / "result.json")
    assert list(watch) == [first, third]


def test_what_was_seen_before_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, 1)
    second = save(tmp_path, 2)
    assert next(new_checkpoints(RunFolder(tmp_path), seen={1})) == second
