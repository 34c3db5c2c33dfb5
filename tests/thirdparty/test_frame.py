"""The frame itself: what these tests stand on trains without any package of others, and one that is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import TINY
from tests.thirdparty.conftest import needs


def test_a_command_trains_in_a_folder_of_its_own(train: Callable[..., Path]) -> None:
    run = train(*TINY, "trainer.max_steps=2")
    assert (run / "result.json").exists()


def test_what_is_missing_is_named() -> None:
    assert needs("pytest").mark.args == (False,)
    mark = needs("pytest", "a_package_that_nobody_has").mark
    assert mark.args == (True,)
    assert mark.kwargs["reason"].startswith("needs a_package_that_nobody_has: ")
