"""What is typed, taken apart and put together."""

from __future__ import annotations

from ddp_train.cli import main
from ddp_train.config.command import command_line


def test_what_is_advised_as_a_command_is_one() -> None:
    assert tuple(main._COMMANDS) == command_line.COMMANDS
