"""The frame itself: what these tests stand on trains without any package of others, and one that is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.thirdparty.conftest import why_missing


def test_a_command_trains_in_a_folder_of_its_own(train: Callable[..., Path]) -> None:
    run = train(*TINY, "trainer.max_steps=2")
    assert (run / "result.json").exists()


def test_what_cannot_be_imported_is_known_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_missing("pytest") == ""
    assert why_missing("a_package_that_nobody_has").startswith("is not installed")
    (tmp_path / "built_for_another.py").write_text("raise RuntimeError('operator x does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert why_missing("built_for_another") == "cannot be imported here: RuntimeError: operator x does not exist"
