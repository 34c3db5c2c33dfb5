"""What errors say can be shown on any terminal."""

from __future__ import annotations

from ddp_train.errors import printable


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[2J\nb\r\x07") == "a\\x1b[2J\nb\\r\\x07"
