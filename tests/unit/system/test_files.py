"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_train.system.files import appears_whole, create_json, json_lines, write_atomic


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


def test_a_file_that_may_not_grow_so_far_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys
        from pathlib import Path
        from ddp_train.system.files import write_atomic
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        try:
            write_atomic(Path(sys.argv[1]), "x" * 4096)
        except OSError as error:
            print(error.filename, error.strerror)"""
    end = subprocess.run([sys.executable, "-c", code, str(tmp_path / "plan.yaml")], capture_output=True, text=True, check=True)
    assert end.stdout == f"{tmp_path / 'plan.yaml'} File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    def fail() -> None:
        with appears_whole(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "half").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with appears_whole(tmp_path / "new" / "file") as partial:
        partial.write_text("whole")
        assert not (tmp_path / "new" / "file").exists()
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ["whole"]


def test_lines_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"step": 1}\n[2]\n{"step": \xff}\n{"step": 3}\n{"st')
    assert [*json_lines(tmp_path / "a.jsonl")] == [{"step": 1}, {"step": 3}]
    assert [*json_lines(tmp_path / "a.jsonl", last_bytes=20)] == [{"step": 3}]
    assert [*json_lines(tmp_path / "nowhere")] == [*json_lines(tmp_path)] == []
