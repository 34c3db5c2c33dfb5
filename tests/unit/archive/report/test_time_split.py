from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.packed import Numbers
from ddp_train.archive.report.time_split import time_split_of
from tests.unit.archive.report.run_files import write_run


@pytest.mark.parametrize("cells", [160, 100_000])
def test_the_parts_sum_to_the_same_however_they_are_thinned(tmp_path: Path, cells: int) -> None:
    numbers = Numbers()
    found = time_split_of(ArchivedRun(write_run(tmp_path / "run")), numbers, cells=cells)
    assert found is not None
    mean = np.concatenate(numbers._arrays)[: found["mean"][1]].reshape(-1, 8)
    assert len(mean) == len(found["steps"]) == min(60, max(8, cells // 16)) and found["steps"][-1] == 60
    np.testing.assert_allclose(mean.sum(0), found["sum"], rtol=1e-4)
    assert found["sum"][1] == pytest.approx(60 * 0.2 + 30 * 0.05) and sum(found["taken"]) == 60
    assert found["not_split"] == {"communication": "gloo"} and found["hosts"] == ["a", "b"]


def test_a_run_of_an_older_version_has_no_split(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "times.jsonl").unlink()
    assert time_split_of(ArchivedRun(run), Numbers(), cells=100) is None
