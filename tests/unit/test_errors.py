"""What errors say can be shown on any terminal."""

from __future__ import annotations

import signal

from ddp_train.errors import INTERRUPTED, TERMINATED, code_of_signals, printable, shell_code


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[2J\nb\r\x07") == "a\\x1b[2J\nb\\r\\x07"


def test_a_signal_gives_the_exit_code_that_a_shell_gives() -> None:
    assert [shell_code(code) for code in (0, 78, -signal.SIGKILL)] == [0, 78, 137]
    assert shell_code(-signal.SIGINT) == code_of_signals([signal.SIGTERM, signal.SIGINT]) == INTERRUPTED
    assert shell_code(-signal.SIGTERM) == code_of_signals([signal.SIGHUP]) == TERMINATED
