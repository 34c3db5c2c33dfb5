"""What the caller may have left in disorder (streams, the current folder, a Ctrl-C)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRONG = f"{sys.executable} -m ddp_train model=mlpp"


@pytest.mark.parametrize(
    ("line", "code", "shown"),
    [
        (f"{WRONG} >&-", 2, "did you mean model=mlp?"),
        (f"{WRONG} 2>&-", 2, ""),
        (f"{WRONG} <&- >&- 2>&-", 2, ""),
        (f"mkdir gone; cd gone; rmdir ../gone; {WRONG}", 78, "the current folder was removed"),
        (f"ulimit -f 1; {sys.executable} -m ddp_train", 78, "File too large; nothing was started"),
        (f"{sys.executable} -m ddp_train hydra.run.dir=läuf", 2, """fix: 'hydra.run.dir="läuf"'"""),
    ],
    ids=["stdout", "stderr", "all", "folder", "limit", "letters"],
)
def test_a_disordered_environment_has_one_clear_end(tmp_path: Path, line: str, code: int, shown: str) -> None:
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert shown in done.stderr


INTERRUPTED_IMPORT = """
import runpy, sys
class Finder:
    def find_spec(self, name, *others):
        if name == "ddp_train.system.fork_server":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
runpy.run_module("ddp_train", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
