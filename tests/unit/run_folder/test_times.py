"""times.jsonl is read whatever a kill or another program has left in it, and the wall time of a run is accounted for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.times import PARTS, Goodput, TimesFile, goodput_of, read_goodput, read_times


def row(seconds: float, *, evaluation: float = 0.0, checkpoint: float = 0.0) -> list[float | None]:
    """Return a row whose steps take so long."""
    return [0.0, seconds, 0.0, None, 0.0, evaluation, checkpoint, 0.0]


def write(run_folder: RunFolder, *attempts: list[dict[str, object]]) -> None:
    for lines in attempts:
        file = TimesFile(run_folder)
        for line in lines:
            file.append_line(line)
        file.close()


def line(step: int, time: float, seconds: float, steps: int, **parts: float) -> dict[str, object]:
    return {"step": step, "time": time, "seconds": seconds, "steps": steps, "ranks": [row(seconds - sum(parts.values()), **parts)]}


def test_the_wall_time_of_a_run_with_attempts_is_split_and_its_parts_sum_to_it(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    first = [{"started": 100.0, "restart": False, "step": 0, "hosts": ["a"]}, line(10, 115, 10, 10), line(20, 127, 12, 10, evaluation=2.0)]
    restarted = [
        {"started": 130.0, "restart": True, "step": 15, "hosts": ["a"]},
        line(20, 136, 5, 5),
        line(30, 147, 11, 10, checkpoint=1.0),
    ]
    queued = [{"started": 200.0, "restart": False, "queued": True, "step": 30, "hosts": ["b"]}, line(40, 211, 10, 10)]
    write(run_folder, first, restarted, queued)
    attempts = read_times(run_folder)
    assert [(attempt.attempt, attempt.hosts, len(attempt.spans)) for attempt in attempts] == [(1, ["a"], 2), (2, ["a"], 2), (3, ["b"], 1)]
    goodput = goodput_of(attempts)
    assert goodput == Goodput(steps=40.0, lost=5.0, evaluation=2.0, checkpoint=1.0, start=7.0, restart=3.0, queue=53.0)
    assert goodput == read_goodput(run_folder)
    assert goodput is not None and goodput.wall == 211 - 100
    assert str(goodput).startswith("36.0% of the time since the first start went into steps; waiting in a queue 47.7%, starting 6.3%")


def test_rows_of_other_ranks_are_not_kept_for_the_goodput(tmp_path: Path) -> None:
    many = {**line(10, 10, 10, 10), "ranks": [row(10.0, checkpoint=float(rank)) for rank in range(1000)]}
    write(RunFolder(tmp_path), [{"started": 0.0, "step": 0}, *[many] * 100])
    tracemalloc.start()
    assert read_goodput(RunFolder(tmp_path)) is not None
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all rows: 30 MB
    tracemalloc.stop()
    [attempt] = read_times(RunFolder(tmp_path))
    assert [len(span.ranks) for span in attempt.spans] == [1000] * 100


def test_steps_of_a_rewind_are_lost(tmp_path: Path) -> None:
    write(RunFolder(tmp_path), [{"started": 0.0, "step": 0}, line(20, 20, 20, 20), line(15, 30, 10, 10)])  # back to 5, and 10 on
    assert goodput_of(read_times(RunFolder(tmp_path))) == Goodput(steps=15.0, lost=15.0)


def test_steps_of_a_rewind_that_no_record_has_are_lost_too(tmp_path: Path) -> None:
    undone = line(15, 28, 8, 0, checkpoint=1.0) | {"lost": True}  # from 20 on to 27, and back to 15
    write(RunFolder(tmp_path), [{"started": 0.0, "step": 0}, line(20, 20, 20, 20), undone, line(20, 33, 5, 5)])
    assert goodput_of(read_times(RunFolder(tmp_path))) == Goodput(steps=20.0, lost=12.0, checkpoint=1.0)


@pytest.mark.parametrize("broken", ['{"step": 3, "ti', "[1, 2]", '{"step": "x", "steps": 1}', '{"attempt": null, "started": "y"}', "\x00"])
def test_what_cannot_be_understood_is_left_out(tmp_path: Path, broken: str) -> None:
    run_folder = RunFolder(tmp_path)
    write(run_folder, [{"started": 0.0, "step": 0}, line(20, 20, 20, 20)])
    with run_folder.times.open("a") as file:
        file.write(f"{broken}\n{json.dumps(line(30, 30, 10, 10))}\n")
    assert [span.step for attempt in read_times(run_folder) for span in attempt.spans] == [20, 30]


def test_a_run_without_the_file_or_a_record_has_no_goodput(tmp_path: Path) -> None:
    assert goodput_of(read_times(RunFolder(tmp_path))) is None
    write(RunFolder(tmp_path), [{"started": 0.0, "step": 0, "parts": PARTS}])
    assert goodput_of(read_times(RunFolder(tmp_path))) is None


def test_half_a_line_makes_way_for_the_next_attempt(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path)
    write(run_folder, [{"started": 0.0, "step": 0}])
    with run_folder.times.open("a") as file:
        file.write('{"step": 5')
    write(run_folder, [{"started": 9.0, "step": 0}])
    assert [json.loads(each)["attempt"] for each in run_folder.times.read_text().splitlines()] == [1, 2]
