"""What a plan is told of a run's sizes, by a process that touches nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddp_train.cli.measure import measuring
from ddp_train.errors import ConfigError
from tests.unit.parts import checked

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


def _children() -> list[str]:
    """Return the numbers of this process' children, those of other tests among them."""
    return sorted(pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split())
