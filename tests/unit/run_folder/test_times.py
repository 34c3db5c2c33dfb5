"""times.jsonl is read whatever a kill or another program has left in it, and the wall time of a run is accounted for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.times import describe_goodput, goodput_of, read_goodput, read_times
from ddp_train.system.phase import Part


def row(seconds: float, *, evaluation: float = 0.0, checkpoint: float = 0.0) -> list[float | None]:
    """Return a row whose steps take so long."""
    return [0.0, seconds, 0.0, None, 0.0, evaluation, checkpoint, 0.0]


def write(run_folder: RunFolder, *lines: dict[str, object]) -> None:
    run_folder.times.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def head(started: float, step: int = 0, **facts: object) -> dict[str, object]:
    return {"started": started, "step": step, "restart": False, "queued": False, "hosts": ["a"], "not_split": {}, **facts}


def goodput(run_folder: RunFolder) -> dict[str, float]:
    """Return the seconds that are not 0, and check that they sum to the wall time, whose share the steps are."""
    found = read_goodput(run_folder)
    assert found is not None and found == goodput_of(read_times(run_folder))
    share, wall = found.pop("share"), found.pop("wall_s")
    assert sum(found.values()) == pytest.approx(wall) and share == pytest.approx(found["steps_s"] / wall, abs=1e-4)
    return {name: seconds for name, seconds in found.items() if seconds}


def line(step: int, time: float, seconds: float, steps: int, **parts: float) -> dict[str, object]:
    return {"step": step, "time": time, "seconds": seconds, "steps": steps, "ranks": [row(seconds - sum(parts.values()), **parts)]}


def test_the_wall_time_of_a_run_with_attempts_is_split_and_its_parts_sum_to_it(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    write(
        run_folder,
        *(head(100), line(10, 115, 10, 10), line(20, 127, 12, 10, evaluation=2.0)),
        *(head(130, 15, restart=True), line(20, 136, 5, 5), line(30, 147, 11, 10, checkpoint=1.0)),
        *(head(200, 30, queued=True, hosts=["b"]), line(40, 211, 10, 10)),
    )
    assert [(attempt.hosts, len(attempt.spans)) for attempt in read_times(run_folder)] == [(["a"], 2), (["a"], 2), (["b"], 1)]
    expected = {"steps": 40, "lost": 5, "evaluation": 2, "checkpoint": 1, "start": 7, "restart": 3, "queue": 53}
    assert goodput(run_folder) == {f"{name}_s": seconds for name, seconds in expected.items()}
    found = read_goodput(run_folder)
    assert found is not None and found["wall_s"] == 211 - 100
    said = "36.0% of the time since the first start went into steps; waiting in a queue 47.7%, starting 6.3%"
    assert describe_goodput(found).startswith(said)


def test_rows_of_other_ranks_are_not_kept_for_the_goodput(tmp_path: Path) -> None:
    many = {**line(10, 10, 10, 10), "ranks": [row(10.0, checkpoint=float(rank)) for rank in range(1000)]}
    write(RunFolder(tmp_path), head(0), *[many] * 100)
    tracemalloc.start()
    assert read_goodput(RunFolder(tmp_path)) is not None
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all rows: 30 MB
    tracemalloc.stop()
    [attempt] = read_times(RunFolder(tmp_path))
    assert [len(span.ranks) for span in attempt.spans] == [1000] * 100


def test_steps_of_a_rewind_are_lost(tmp_path: Path) -> None:
    write(RunFolder(tmp_path), head(0), line(20, 20, 20, 20), line(15, 30, 10, 10))  # back to 5, and 10 on
    assert goodput(RunFolder(tmp_path)) == {"steps_s": 15.0, "lost_s": 15.0}


def test_steps_of_a_rewind_that_no_record_has_are_lost_too(tmp_path: Path) -> None:
    undone = line(27, 28, 8, 7, checkpoint=1.0)  # and back to 15
    write(RunFolder(tmp_path), head(0), line(20, 20, 20, 20), undone, line(20, 33, 5, 5))
    assert goodput(RunFolder(tmp_path)) == {"steps_s": 20.0, "lost_s": 12.0, "checkpoint_s": 1.0}


@pytest.mark.parametrize("broken", ['{"step": 3, "ti', "[1, 2]", '{"step": "x", "steps": 1}', '{"step": 1, "started": "y"}', "\x00"])
def test_what_cannot_be_understood_is_left_out(tmp_path: Path, broken: str) -> None:
    run_folder = RunFolder(tmp_path)
    write(run_folder, head(0), line(20, 20, 20, 20))
    with run_folder.times.open("a") as file:
        file.write(f"{broken}\n{json.dumps(line(30, 30, 10, 10))}\n")
    assert [span.step for attempt in read_times(run_folder) for span in attempt.spans] == [20, 30]


def test_a_run_without_the_file_or_a_record_has_no_goodput(tmp_path: Path) -> None:
    assert goodput_of(read_times(RunFolder(tmp_path))) is None
    write(RunFolder(tmp_path), head(0, parts=[*Part]))
    assert goodput_of(read_times(RunFolder(tmp_path))) is None
