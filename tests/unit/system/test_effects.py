"""A process that may look and not touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = "import os, shutil, socket, sqlite3, subprocess, sys, tempfile\nfrom ddp_train.system.effects import refuse_effects\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = f"{BEFORE}refuse_effects('the test')\n{code}"
    return subprocess.run([sys.executable, "-B", "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("open('new', 'w')", "writes nothing"),
        ("open('there', 'a')", "writes nothing"),
        ("open('there', 'r+')", "writes nothing"),
        ("os.open('new', os.O_CREAT | os.O_RDONLY)", "writes nothing"),
        ("os.mkdir('new')", "writes nothing"),
        ("os.rename('there', 'new')", "writes nothing"),
        ("os.unlink('there')", "writes nothing"),
        ("shutil.copy('there', 'new')", "writes nothing"),
        ("os.symlink('there', 'new')", "writes nothing"),
        ("os.utime('there')", "writes nothing"),
        ("tempfile.mkdtemp()", "writes nothing"),
        ("sqlite3.connect('new')", "writes nothing"),
        ("socket.create_connection(('127.0.0.1', 9))", "opens no connection"),
        ("socket.create_server(('127.0.0.1', 0))", "opens no connection"),
        ("subprocess.run(['true'])", "starts no process"),
        ("os.system('true')", "starts no process"),
        ("os.fork()", "starts no process"),
    ],
)
def test_nothing_is_written_reached_or_started(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "there").write_text("as it was")
    ended = run(tmp_path, code)
    assert ended.returncode == 1 and f"PermissionError: [Errno 1] the test {reason}" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "as it was"


def test_it_reads_and_imports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 3\n")
    code = "import mine\nprint(mine.x, open('mine.py').read(), len(os.listdir('.')), tempfile.gettempdir())\nopen(os.devnull, 'w').close()"
    ended = subprocess.run(  # with -B left out: Python would write what it has compiled
        [sys.executable, "-c", f"{BEFORE}refuse_effects('the test')\n{code}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("3 x = 3")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
