"""The run folder: nothing in it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.run_folder.paths import ProfileRequest, RunFolder


def test_a_config_that_is_replaced_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"):
        folder.record_config(text)
    assert folder.config.read_text() == "a: 3\n"
    assert [(tmp_path / f"config.{number}.yaml").read_text() for number in (1, 2)] == ["a: 1\n", "a: 2\n"]


def test_a_request_is_taken_once_as_it_was_put(tmp_path: Path) -> None:
    run_folder, request = RunFolder(tmp_path), ProfileRequest(kind="memory", steps=3, ranks=[0, 2])
    assert request.put(run_folder) and run_folder.profile_request.exists()
    assert not ProfileRequest().put(run_folder)  # the first one counts
    assert ProfileRequest.pop(run_folder) == request
    assert not run_folder.profile_request.exists()


def test_a_file_that_was_touched_leaves_everything_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile.request").touch()
    assert ProfileRequest.pop(RunFolder(tmp_path)) == ProfileRequest(kind=None, steps=None, ranks=None)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"steps": 0}', '{"steps": true}', '{"ranks": [-1]}', '{"ranks": 1}', '{"kind": "x"}', '{"a": 1}']
)
def test_what_is_no_request_is_refused_and_gone(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.request").write_text(text)
    with pytest.raises(ValueError, match=r"not|Expecting"):
        ProfileRequest.pop(RunFolder(tmp_path))
    assert not (tmp_path / "profile.request").exists()
