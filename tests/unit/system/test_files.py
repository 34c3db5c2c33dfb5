"""Files that are there whole or not at all."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_train.system.files import create_json


def test_of_many_threads_one_creates_a_report_and_it_is_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for trial in range(60):
            path = tmp_path / f"{trial}.json"
            created = list(pool.map(lambda thread, path=path: create_json(path, {"thread": thread}), range(4)))  # type: ignore[misc]
            assert created.count(True) == 1
            assert json.loads(path.read_text()) == {"thread": created.index(True)}
    assert len(list(tmp_path.iterdir())) == 60
