"""What a plan is told of a run's sizes, by a process that touches nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_train.cli.measure import measuring
from ddp_train.errors import ConfigError
from tests.unit.parts import checked

BEFORE = "import os, shutil, socket, sqlite3, subprocess, sys, tempfile\nfrom ddp_train.cli.measure import forbid_effects\n"
SLOW = """import time
from torch import nn

class Slow(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        time.sleep(60)

class Dies(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        import os
        os._exit(3)

class Writes(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        open("written", "w").write("x")

class Quiet(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        print("hello")
        super().__init__(3, num_classes)
"""


def measured(*overrides: str, within_s: float = 30.0) -> dict[str, Any] | str:
    with measuring(checked(*overrides), within_s=within_s) as answer:
        return answer()


def of_own(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, within_s: float = 30.0) -> dict[str, Any] | str:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "measured_models.py").write_text(SLOW)
    keys = ["~model.image_shape", "~model.width", "~model.depth", f"model._target_=measured_models.{name}"]
    config = checked("model=mlp", *keys, base=[])
    with measuring(config, within_s=within_s) as answer:
        return answer()


def test_the_sizes_come_back() -> None:
    found = measured("trainer.max_steps=7")
    assert isinstance(found, dict)
    assert (found["model"], found["steps"], found["epoch_size"]) == ("MLP", 7, 640)


def test_parts_that_do_not_fit_are_told_as_the_ranks_would() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.warmup_steps") as caught:
        measured("scheduler.warmup_steps=100000")
    assert caught.value.fix


def test_data_that_is_not_here_is_no_mistake(tmp_path: Path) -> None:
    with measuring(checked("data=mnist", f"data.root={tmp_path}/there", base=[])) as answer:
        found = answer()
    assert isinstance(found, str) and "lacks train-images" in found and "ddp-train plan opens no connection" in found
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_takes_too_long_dies_or_writes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_own("Slow", tmp_path, monkeypatch, within_s=1.0) == "building it without values takes longer than 1 s"
    assert of_own("Dies", tmp_path, monkeypatch) == "the process that built it without values has died"
    assert "PermissionError: [Errno 1] ddp-train plan writes nothing" in of_own("Writes", tmp_path, monkeypatch)
    assert not (tmp_path / "written").exists()


def test_what_it_prints_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(of_own("Quiet", tmp_path, monkeypatch), dict)
    assert capfd.readouterr() == ("", "")


def test_no_process_and_no_descriptor_is_left() -> None:
    before = os.listdir("/proc/self/fd"), _children()
    with pytest.raises(ZeroDivisionError), measuring(checked()):
        1 / 0  # noqa: B018
    assert (os.listdir("/proc/self/fd"), _children()) == before


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = f"{BEFORE}forbid_effects()\n{code}"
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
    assert ended.returncode == 1 and f"PermissionError: [Errno 1] ddp-train plan {reason}" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "as it was"


def test_it_reads_and_imports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 3\n")
    code = "import mine\nprint(mine.x, open('mine.py').read(), len(os.listdir('.')), tempfile.gettempdir())\nopen(os.devnull, 'w').close()"
    ended = subprocess.run(  # with -B left out: Python would write what it has compiled
        [sys.executable, "-c", f"{BEFORE}forbid_effects()\n{code}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("3 x = 3")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def _children() -> list[str]:
    """Return the numbers of this process' children, those of other tests among them."""
    return sorted(pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split())
