"""The run folder: nothing in it is lost."""

from __future__ import annotations

from pathlib import Path

from ddp_train.run_folder.paths import RunFolder


def test_a_config_that_is_replaced_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"):
        folder.record_config(text)
    assert folder.config.read_text() == "a: 3\n"
    assert [(tmp_path / f"config.{number}.yaml").read_text() for number in (1, 2)] == ["a: 1\n", "a: 2\n"]
