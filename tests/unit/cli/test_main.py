"""The commands, and what each says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddp_train.cli import main
from ddp_train.launch.launcher import Launcher


def must_not_run(*given: object) -> int:
    raise AssertionError("something was started")


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(run=must_not_run, slots=must_not_run)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", main._COMMANDS)
def test_every_command_says_how_it_is_typed(
    name: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", name, "--help"])
    assert main.run(launcher) == 0
    assert capsys.readouterr().out.startswith(f"ddp-train {name} ")
    assert not launcher.has_begun


@pytest.mark.parametrize("name", ["resume", "runs"])
def test_a_command_without_its_folder_asks_for_it(
    name: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-train", name])
    assert main.run(launcher) == 2
    assert f"expected: ddp-train {name} " in capsys.readouterr().err


def test_a_command_imports_what_it_needs_alone() -> None:
    code = "import sys; import ddp_train.cli.main; print(*({'rich', 'asyncio', 'torch', 'ddp_train.launch.submit'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []
