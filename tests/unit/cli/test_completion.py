"""TAB in real shells, at a real terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ddp_train.cli.completion import complete
from ddp_train.errors import UserError
from tests.fake_runner import FakeRunner

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
PREPARE = {"bash": "source ./script", "zsh": "autoload -Uz compinit; compinit -u -D; source ./script", "fish": "source ./script"}


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, words: list[str], folder: Path) -> None:
        environment = os.environ | {"TERM": "xterm", "PS1": "READY> ", "HOME": str(folder), "ZDOTDIR": str(folder), "COLUMNS": "200"}
        self._pid, self._ours = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, environment)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, text: str, within_s: float = 20) -> str:
        """Return what has been shown, as soon as `text` is in it."""
        shown, deadline = "", time.monotonic() + within_s
        while text not in shown and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.2)[0]:
                data = os.read(self._ours, 65536)
                if b"\x1b[c" in data or b"\x1b[0c" in data:  # fish asks what the terminal is
                    self.type("\x1b[?1;2c")
                shown += data.decode(errors="replace")
        assert text in shown, shown
        return shown

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._ours)


@pytest.fixture(params=SHELLS)
def terminal(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setattr(sys, "argv", ["ddp-train", "completion", shell])
    complete([shell], FakeRunner())
    (tmp_path / "script").write_text(capsys.readouterr().out)
    with closing(Terminal(SHELLS[shell], tmp_path)) as terminal:
        terminal.type(f"{PREPARE[shell]}; echo COMES''NOW\r")
        terminal.read_until("COMESNOW")
        time.sleep(0.5)  # its prompt
        yield terminal


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # it executes a shell at once
def test_tab_completes_commands_options_and_keys_at_once(terminal: Terminal) -> None:
    took = []
    for typed, completed in (("resu", "me"), ("runs cle", "an"), ("model=mini", "_resnet"), ("seed=1 trainer.grad_ac", "cum_steps=")):
        begin = time.monotonic()
        terminal.type(f"ddp-train {typed}\t")
        terminal.read_until(completed)
        took.append(time.monotonic() - begin)
        terminal.type("\x15")  # the line is emptied
    assert min(took) < 0.3


def test_another_shell_is_refused() -> None:
    with pytest.raises(UserError, match="no completion for tcsh"):
        complete(["tcsh"], FakeRunner())
