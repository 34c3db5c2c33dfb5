"""Files that are there whole or not at all."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_train.system.files import create_json, write_atomic


def test_of_many_threads_one_creates_a_report_and_it_is_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for trial in range(60):
            path = tmp_path / f"{trial}.json"
            created = list(pool.map(lambda thread, path=path: create_json(path, {"thread": thread}), range(4)))  # type: ignore[misc]
            assert created.count(True) == 1
            assert json.loads(path.read_text()) == {"thread": created.index(True)}
    assert len(list(tmp_path.iterdir())) == 60


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("theirs")
    (tmp_path / "file").symlink_to("precious")
    write_atomic(tmp_path / "file", "ours")
    assert ((tmp_path / "file").read_text(), (tmp_path / "precious").read_text()) == ("ours", "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "precious"]
