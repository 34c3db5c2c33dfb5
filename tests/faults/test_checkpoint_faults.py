"""Checkpoints under fire: killed inside a save, damaged on disk, and a disk that takes no more."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp_train.checkpoint import codec
from ddp_train.checkpoint.catalog import remove_debris
from ddp_train.checkpoint.read import newest_good, read_shared
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.conftest import STRATEGIES, TINY, Project, fill, finish, metrics, wait_for
from tests.unit.checkpoint_ranks import Ranks
from tests.unit.parts import components
from tests.unit.sharded_tensors import rank_of, sharded_among

SAVER = """
import os, sys
from pathlib import Path
from tests.unit.checkpoint_ranks import Ranks
from tests.unit.parts import components
parts = components("model.width=512", "optimizer=adamw")
folder = Path(sys.argv[1])
for line in sys.stdin:
    if pid := os.fork():
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    ranks = Ranks(folder, parts)
    step = int(line)
    while True:
        assert ranks.save(step) is None
        step += 1
"""


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.long)])
def test_a_job_killed_inside_a_save_has_a_good_checkpoint_and_leaves_no_debris(tmp_path: Path, times: int) -> None:
    """Three ranks in one process, which saves without a pause."""
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    inside, step = 0, 1
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while inside < times:
            server.stdin.write(f"{step}\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            last = f"step_{step + dice.randrange(4):08d}"
            wait_for(lambda name=last: any(tmp_path.glob(f".partial_{name}*")) or (tmp_path / name).exists())  # type: ignore[misc]
            time.sleep(dice.random() * 0.03)
            under_way = _step_under_way(tmp_path)
            os.kill(pid, signal.SIGKILL)
            assert server.stdout.readline() == "gone\n"
            inside += _step_under_way(tmp_path) > 0
            good = newest_good(tmp_path)
            assert good == max(tmp_path.glob("step_*"), default=None)  # none is passed over
            found = int(good.name.removeprefix("step_")) if good else 0
            assert found >= under_way - 1  # the save before was there
            remove_debris(tmp_path)
            assert all(path.name.startswith("step_") for path in tmp_path.iterdir())
            step = found + 1
        server.stdin.close()


def _step_under_way(folder: Path) -> int:
    """Return the step that is being saved; 0: none."""
    return max((int(path.name.split("_")[2]) for path in folder.glob(".partial_step_*")), default=0)


def _pids(folder: Path) -> list[int]:
    """Return the processes that stand in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "times"), [("ddp", 50), ("zero1", 10), ("fsdp", 20)])
def test_a_whole_run_killed_inside_a_save_many_times_ends_as_if_nothing_had_been(project: Project, strategy: str, times: int) -> None:
    seed, every, steps = int(os.environ.get("FAULT_SEED", random.randrange(10**6))), 3, 600
    print("seed", seed)
    dice = random.Random(seed)
    command = [*TINY, "model.width=256", "optimizer=adamw", "cluster=cpu", "cluster.processes_per_node=3", f"trainer.max_steps={steps}"]
    command += ["trainer.max_epochs=null", "evaluation.every_steps=600", f"checkpoint.every_steps={every}", "checkpoint.keep_last=1"]
    command.append(f"strategy={strategy}")
    whole = project.run(*command, "hydra.run.dir=outputs/whole", timeout=600)
    assert whole.returncode == 0, whole.output
    folder = project.folder / "outputs/killed/checkpoints"
    inside = expected = idle = 0  # starts in a row without a new checkpoint: too many, and the run is refused
    arguments, left = [*command, "hydra.run.dir=outputs/killed"], list[str]()
    while inside < times:
        process = project.start(*arguments)
        wait_for(lambda names=left: not any((folder / name).exists() for name in names))  # type: ignore[misc]  # the debris goes at the start
        wait_for(lambda: _step_under_way(folder) > 0)
        pids = _pids(project.folder)
        target = _newest_step(folder) + every * dice.randrange(1 if idle < 2 else 2, 4)
        while _step_under_way(folder) < target and _newest_step(folder) <= target:  # a save takes some 20 ms: no pauses as `wait_for` makes
            assert process.poll() is None, finish(process).output  # the run must not be over yet
        time.sleep(dice.random() * 0.015)
        under_way = _step_under_way(folder)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        done = finish(process)
        if expected:
            resumed = re.search(r"resumed  after step (\d+)", done.stdout)
            assert resumed, done.output
            assert int(resumed[1]) == expected
        left = [path.name for path in folder.glob(".*")]
        inside += any(name.startswith(".partial") for name in left)
        good = newest_good(folder)
        assert good == max(folder.glob("step_*"), default=None)  # none is passed over
        assert good is not None or under_way <= every
        idle = idle + 1 if _newest_step(folder) == expected else 0
        expected = _newest_step(folder)
        assert expected >= under_way - every
        arguments = ["resume", "outputs/killed"]
        if expected > steps - 60:  # go back, so that there is room for more
            shutil.rmtree(project.folder / "outputs/killed")
            arguments, expected, left = [*command, "hydra.run.dir=outputs/killed"], 0, []
        print(f"{inside} inside a save, step {expected} of {steps}", flush=True)
    last = project.run("resume", "outputs/killed", timeout=600)
    assert last.returncode == 0, last.output
    assert not list(folder.glob(".*"))
    runs = [project.folder / "outputs" / name for name in ("whole", "killed")]
    losses = [[(record["step"], record["loss"]) for record in metrics(run, "train")] for run in runs]
    assert losses[0] == losses[1]
    states = [read_shared(run / f"checkpoints/step_{steps:08d}") for run in runs]
    for tensors in zip(*(codec.encode(state, "")[1].values() for state in states), strict=True):
        assert torch.equal(*tensors)


def _newest_step(folder: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*")), default=0)


@pytest.fixture(scope="module", params=["whole", "cut"])
def two_checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with two checkpoints of three ranks, which have all tensors whole, or rows of each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    parts = components("optimizer=adamw")
    ranks = Ranks(folder, parts)
    save = ranks.save if request.param == "whole" else partial(_save_cut, ranks)
    assert save(1) is None
    for parameter in parts.model.parameters():
        parameter.data.add_(1)
    assert save(2) is None
    return folder


def _save_cut(ranks: Ranks, step: int) -> str | None:
    """Save as ranks do that a strategy has given the rows of all tensors."""
    state = TrainState(step=step, position=step * 32)
    for rank, (saver, world) in enumerate(zip(ranks.savers, ranks.worlds, strict=True)):
        found = checkpoint_content(ranks.parts[rank], state, WindowSums(), world)
        with rank_of(rank, len(ranks.savers)) as mesh:
            shared = tree_map_only(Tensor, lambda whole, mesh=mesh: sharded_among(mesh, whole) if whole.ndim else whole, dict(found.shared))
            saver.save(replace(found, shared=shared))
    return ranks.finish()


FILES = [*(f"rank_{rank:05d}.safetensors" for rank in range(3)), "manifest.json", "COMPLETE"]


def _flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content) - 1)] ^= 1 << dice.randrange(8)  # the mark's last byte is the end of its line
    path.write_bytes(content)


def _truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size - 1))


def _zero(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = dice.choice([position for position in range(0, len(content), 512) if any(content[position : position + 512])])
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def _delete(path: Path, dice: random.Random) -> None:
    path.unlink()


def _swap_with_another(path: Path, dice: random.Random) -> None:
    other = path.with_name(dice.choice([name for name in FILES if name != path.name]))
    path.rename(path.with_name("swap"))
    other.rename(path)
    path.with_name("swap").rename(other)


def _swap_with_an_older(path: Path, dice: random.Random) -> None:
    shutil.copy(path.parent.with_name("step_00000001") / path.name, path)


MUTATIONS: list[Callable[[Path, random.Random], None]] = [_flip, _truncate, _zero, _delete, _swap_with_another, _swap_with_an_older]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_every_mutation_is_found_and_named_and_the_one_before_is_used(
    two_checkpoints: Path, tmp_path: Path, name: str, mutate: Callable[[Path, random.Random], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    folder = Path(shutil.copytree(two_checkpoints, tmp_path / "copy"))
    mutate(folder / "step_00000002" / name, random.Random(seed))
    assert newest_good(folder) == folder / "step_00000001"
    printed = capsys.readouterr().out
    print(printed)  # the seed, where this fails
    _, refused = printed.splitlines()
    assert refused.startswith("checkpoint step_00000002 is not used: ")
    if mutate is not _swap_with_another:  # which is found at the first of the two
        assert name in refused


FULL = [*TINY, "model.width=512", "optimizer=adamw", "cluster=cpu", "cluster.processes_per_node=3", "checkpoint.every_steps=4"]


def _start_with_small_files(project: Project, *arguments: str) -> subprocess.Popen[str]:
    """Start a run whose files may have a megabyte each: less than a rank's share of a checkpoint, and enough for its logs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        return project.start(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
def test_a_run_that_cannot_save_trains_on_and_does_not_claim_success(project: Project, strategy: str) -> None:
    done = finish(_start_with_small_files(project, *FULL, "trainer.max_steps=10", f"strategy={strategy}"))
    assert done.returncode == 1
    run = project.the_run()
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, 11))
    for step in (4, 8, 10):
        assert f"the checkpoint of step {step} was NOT saved; earlier ones are unchanged. rank 0: File too large" in done.stdout
    assert "all steps are done, but the last one was not saved" in done.output
    assert "Done:" not in done.output
    assert not list((run / "checkpoints").iterdir())
    assert json.loads((run / "result.json").read_text())["status"] == "failed"


@pytest.mark.long
@pytest.mark.distributed
def test_a_stop_that_cannot_save_says_where_the_run_continues(project: Project) -> None:
    process = _start_with_small_files(project, *FULL, "trainer.max_steps=100000", "trainer.max_epochs=null")
    wait_for(lambda: any(project.folder.glob("outputs/**/metrics.jsonl")) and len(metrics(project.the_run(), "train")) > 5)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 75, done.output
    assert re.search(r"stopped after step \d+, which was NOT saved; the run continues from the start", done.stdout)


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_a_stop_on_a_full_disk_names_it_and_the_run_goes_on_from_the_last_checkpoint(small_disk: Path, how: str) -> None:
    project = Project(small_disk)
    process = project.start(
        *TINY, "cluster=cpu", "trainer.max_steps=1000000", "trainer.max_epochs=null", "checkpoint.every_steps=30", "hydra.run.dir=run"
    )
    wait_for(lambda: any((small_disk / "run/checkpoints").glob("step_*/COMPLETE")))
    filler = fill(small_disk)
    if how == "cancel":
        cancelled = project.run("cancel", "run")
        assert cancelled.returncode == 0, cancelled.output
    else:
        process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.output
    assert "run cannot be written: No space left on device" in ended.output
    assert "which was NOT saved; the run continues from step" in ended.output and "The run failed" not in ended.output
    again = project.run("resume", "run")
    assert again.returncode == 78 and "No space left on device" in again.output and "os._exit" not in again.output
    filler.unlink()
    assert project.run("resume", "run", "trainer.max_steps=60").returncode in (0, 2)  # 2: more steps than that are taken
