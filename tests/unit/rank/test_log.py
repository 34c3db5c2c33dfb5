"""A rank's log has everything that the rank says, and rank 0's terminal what is meant for people."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, sys
from pathlib import Path
from ddp_train.rank.log import redirect_output
from ddp_train.run_folder.paths import RunFolder
rank, is_shown = int(sys.argv[1]), sys.argv[2] == "shows"
with redirect_output(RunFolder(Path("run")), rank, is_shown=is_shown) as terminal:
    print("printed")
    print("to stderr", file=sys.stderr)
    logging.info("root info")
    logging.getLogger("theirs").info("their info")
    logging.getLogger("theirs").warning("their warning with %s", "s3cr3t_of_mine")
    logging.getLogger("ddp_train.rank.train_job").warning("our warning")
    print("screen", file=terminal)
print("after")
"""


def say(folder: Path, rank: int, shows: str) -> tuple[str, str, str]:
    """Return what came to stdout, to stderr and into the log."""
    environment = {**os.environ, "MY_API_KEY": "s3cr3t_of_mine"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(rank), shows], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr, (folder / f"run/logs/rank_{rank:05d}.log").read_text()


def test_what_rank_0_prints_is_on_the_terminal_and_in_its_log(tmp_path: Path) -> None:
    stdout, stderr, log = say(tmp_path, 0, "shows")
    assert stdout == "printed\nafter\n"
    assert stderr == "to stderr\ntheir warning with ***\nscreen\n"
    for text in (
        "printed\n",
        "to stderr\n",
        "INFO root info\n",
        "INFO their info\n",
        "WARNING their warning with ***\n",
        "WARNING our warning\n",
    ):
        assert log.count(text) == 1, (text, log)
    assert "screen" not in log and "after" not in log


def test_other_ranks_and_the_jobs_of_a_sweep_leave_the_terminal_alone(tmp_path: Path) -> None:
    for rank, shows in ((1, "shows"), (0, "quiet")):
        stdout, stderr, log = say(tmp_path, rank, shows)
        assert (stdout, stderr) == ("after\n", "screen\n")
        for text in ("printed\n", "to stderr\n", "INFO root info\n", "INFO their info\n", "WARNING their warning with ***\n"):
            assert log.count(text) == 1, (text, log)


SPEAKS_ON = """
import resource, sys
from pathlib import Path
from ddp_train.rank.log import redirect_output
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system import terminal

terminal.protect_streams()  # as each rank does
with redirect_output(RunFolder(Path("run")), int(sys.argv[1]), is_shown=True) as screen:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no file grows any more, as on a full disk
    for _ in range(300):
        print("x" * 100)
        print("y" * 100, end="", file=sys.stderr)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print("trained on", file=screen)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_printed_while_the_disk_is_full_ends_no_rank(tmp_path: Path, rank: int) -> None:
    line = [sys.executable, "-c", SPEAKS_ON, str(rank)]
    with (tmp_path / "screen").open("w") as screen:
        subprocess.run(line, cwd=tmp_path, stdout=screen, stderr=subprocess.STDOUT, check=True)
    assert (tmp_path / f"run/logs/rank_{rank:05d}.log").stat().st_size <= 1000


SPEAKS_C = """
import ctypes, os, sys
from pathlib import Path
from ddp_train.rank.log import redirect_output
from ddp_train.run_folder.paths import RunFolder

libc = ctypes.CDLL(None)
libc.printf(b"before\\n")
with redirect_output(RunFolder(Path(sys.argv[1])), 0, is_shown=False):
    libc.printf(b"NCCL INFO NCCL_ALGO set by environment to ^NVLS\\n")
    os._exit(0)  # as a rank leaves; one that is killed or aborts empties no buffer either
"""


_BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which C obeys, too


def test_what_c_writes_to_its_stdout_is_in_the_log_of_a_rank_that_leaves_without_ado(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKS_C, str(tmp_path)], capture_output=True, text=True, timeout=60, env=_BUFFERED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "before\n"
    assert "NCCL INFO NCCL_ALGO set by environment to ^NVLS\n" in (tmp_path / "logs/rank_00000.log").read_text()
