"""Later jobs of a sweep are composed from the YAML that was there when it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.sweep.sweeper import _copy_yaml


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Give a folder of YAML, with a file of another kind."""
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model/wide.yaml").write_text("width: 999\n")
    (folder / "weights.pt").touch()
    return folder


def test_the_copy_stays_when_a_file_is_edited(conf: Path, tmp_path: Path) -> None:
    copied = tmp_path / "sweep/conf/path_0"
    assert _copy_yaml(f"file://{conf}", copied) == f"file://{copied}"
    (conf / "model/wide.yaml").write_text("width: 1\n")
    assert _copy_yaml(str(conf), copied) == f"file://{copied}"  # an attempt that continues the sweep
    assert [path.relative_to(copied) for path in copied.rglob("*") if path.is_file()] == [Path("model/wide.yaml")]
    assert (copied / "model/wide.yaml").read_text() == "width: 999\n"


@pytest.mark.parametrize("path", ["pkg://hydra.conf", "structured://", "/nowhere"])
def test_what_is_no_folder_of_files_is_used_as_it_is(path: str, tmp_path: Path) -> None:
    assert _copy_yaml(path, tmp_path / "copied") == path
    assert not list(tmp_path.iterdir())


def test_where_no_copy_can_be_kept_it_is_said(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _copy_yaml(str(conf), conf / "outputs/sweep/conf/path_0") == str(conf)
    assert "do not edit its YAML while the sweep runs" in capsys.readouterr().err
