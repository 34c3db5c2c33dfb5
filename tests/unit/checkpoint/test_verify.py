"""Every damage has a name, and makes a checkpoint none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.catalog import set_aside
from ddp_train.checkpoint.manifest import CheckpointError
from ddp_train.checkpoint.read import damage_of, newest_good, read_own, read_shared
from ddp_train.checkpoint.save import Saver
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.checkpoint.states import FILE, forge, saved
from tests.unit.parts import components


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def remake(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    f"{FILE} is damaged": lambda path: flip(path / FILE),
    f"{FILE} has 10 bytes instead of": lambda path: os.truncate(path / FILE, 10),
    f"{FILE} is missing": lambda path: (path / FILE).unlink(),
    f"{FILE} cannot be opened": lambda path: remake(path / FILE, lambda link: link.symlink_to("/etc/hostname")),
    f"{FILE} is not a plain file": lambda path: remake(path / FILE, os.mkfifo),
    "other.bin is not in manifest.json": lambda path: (path / "other.bin").touch(),
    "COMPLETE is missing": lambda path: (path / "COMPLETE").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is damaged": lambda path: flip(path / "manifest.json"),
    "manifest.json cannot be read": lambda path: forge(path, files=3),
    "manifest.json is of format 99": lambda path: forge(path, format=99),
    "300000000 ranks at step 2 do not leave 1 files": lambda path: forge(path, world_size=300_000_000),
    "0 ranks at step 2 do not leave": lambda path: forge(path, world_size=0),
    "-1 ranks at step 2 do not leave": lambda path: forge(path, world_size=-1),
    "1 ranks at step -2 do not leave": lambda path: forge(path, step=-2),
    "manifest.json is of step 7": lambda path: forge(path, step=7),
    "'../step_00000001/COMPLETE' is not the name": lambda path: forge(
        path,
        files={"../step_00000001/COMPLETE": {"bytes": 1, "xxh3_128": ""}}
        | {FILE: {"bytes": (path / FILE).stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest((path / FILE).read_bytes())}},
    ),
    "step_00000002 is not a folder": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    DAMAGES[said](bad)
    assert newest_good(tmp_path) == good
    (refused,) = capsys.readouterr().out.splitlines()
    assert said in refused
    assert "step_00000002" in refused


def number(run: Path, number: str) -> Path:
    """Give a run folder its number, and return its checkpoints."""
    (run / "checkpoints").mkdir(parents=True)
    (run / "environment.json").write_text(json.dumps({"run": number}))
    return run / "checkpoints"


def test_a_checkpoint_of_another_run_is_named_passed_over_and_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = number(tmp_path / "ours", "1111"), number(tmp_path / "theirs", "2222")
    good, foreign = saved(ours, 2, run="1111"), saved(theirs, 3, run="2222")
    earlier = shutil.copytree(saved(theirs, 1, run="2222"), ours / "step_00000001")
    copy = shutil.copytree(foreign, ours / foreign.name)
    assert newest_good(theirs) == foreign  # in its own folder it is good
    assert newest_good(ours) == good
    assert "step_00000003 is not used: it is of another run (manifest.json says 2222, and the run of this folder is 1111)" in read(capsys)
    assert [each.path for each in catalog.saved_checkpoints(ours)] == [good]  # to be kept, to be the best, to be evaluated
    assert catalog.find_checkpoint(ours / "last", damage_of, key="RUN") == good
    assert "step_00000003 is not used: it is of another run" in read(capsys)
    with pytest.raises(UserError, match="it is of another run"):  # also where somebody types it
        catalog.find_checkpoint(copy, damage_of, key="resume")
    assert len(set_aside(ours, from_step=2, chosen=good)) == 2 and not copy.exists() and not earlier.exists()
    assert newest_good((tmp_path / "ours").rename(tmp_path / "moved") / "checkpoints") is not None  # the number travels with the folder


def read(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(("step", "run", "said"), [(1, "1111", "is of step 1"), (2, "2222", "it is of another run")])
def test_a_ranks_file_of_another_step_or_run_is_refused(tmp_path: Path, step: int, run: str, said: str) -> None:
    folder = number(tmp_path / "run", "1111")
    path, other = saved(folder, 2, run="1111"), saved(tmp_path / "elsewhere/checkpoints", step, run=run)
    assert read_shared(path)["state"]["step"] == 2
    shutil.copy(other / FILE, path / FILE)
    content = (path / FILE).read_bytes()
    forge(path, files={FILE: {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}})
    assert damage_of(path) is None  # the manifest fits the file
    for reading in (lambda: read_own(path, 0), lambda: read_shared(path)):
        with pytest.raises(CheckpointError, match=said):
            reading()


def test_the_step_of_the_state_is_that_of_the_manifest(tmp_path: Path) -> None:
    parts, saver = components(), Saver(folder=tmp_path, world=alone(), config_hash="abc")
    saver.save(replace(checkpoint_content(parts, TrainState(step=3), WindowSums(), alone()), step=4))
    assert saver.finish() is None
    with pytest.raises(CheckpointError, match="its state is of step 3"):
        read_shared(tmp_path / "step_00000004")
