"""Every strategy trains the same run, on any number of processes, and goes on from what any other has saved."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, metrics
from tests.distributed.test_token_exactness import GLOBAL_BATCH, SMALL_GPT, write_data

pytestmark = pytest.mark.distributed


def run_all(project: Project, world_size: int, *overrides: str) -> dict[str, Any]:
    script = Path(__file__).with_name("runs_of_strategies.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(script)]
    folder = project.folder / "runs"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, str(folder), *overrides],
        cwd=project.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{world_size}.json").read_text())
    return found


def assert_same_curve(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    expected = expected[len(expected) - len(found) :]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine["split"], mine["step"]) == (theirs["split"], theirs["step"])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=1e-5)


@pytest.mark.parametrize("world_sizes", [(1, 3), pytest.param((1, 4, 2, 3), marks=pytest.mark.long)])
def test_strategies_give_the_curve_of_one_process_and_read_each_others_checkpoints(project: Project, world_sizes: tuple[int, ...]) -> None:
    """With padded documents, accumulation, clipping, averaged weights, a frozen block that thaws, tied weights, unequal evaluation."""
    root = write_data(project.folder / "tokens", num_empty=7)
    settings = [*SMALL_GPT, "data=padded_tokens", f"data.root={root}", f"trainer.global_batch_size={GLOBAL_BATCH}"]
    settings += ["loader.micro_batch_size=2", "trainer.max_steps=5", "model.vocab_size=31"]
    alone: dict[str, Any] = {}
    written: set[str] = set()
    for world_size in world_sizes:
        found = run_all(project, world_size, *settings)
        alone = alone or found
        written |= {f"{name}_{world_size}" for name in found if " from " not in name}
        resumed = {name: each for name, each in found.items() if " from " in name}
        assert len(resumed) == len(written) * (len(found) - len(resumed))
        for name, each in found.items():
            assert_same_curve(each["records"], alone["ddp"]["records"])
            strategy, _, source = name.partition(" from ")
            if source == f"{strategy}_{world_size}":
                own = found[strategy]
                assert each["records"] == own["records"][-len(each["records"]) :], name  # to the bit
                assert each["weights"] == own["weights"], name
        assert {record["split"] for record in alone["ddp"]["records"]} == {"train", "eval"}


BESIDE = {
    "activation_checkpointing": ["activation_checkpointing=full"],
    "compile": ["compile=default", "compile.backend=aot_eager"],
    "both": ["compile=default", "compile.backend=aot_eager", "activation_checkpointing=selective"],
    "prefetch": ["strategy.prefetch=2"],
    "profile": ["profile=trace", "profile.start_step=2", "profile.steps=1"],
}


@pytest.mark.long
def test_fsdp_gives_the_same_curve_with_all_that_changes_how_a_step_is_computed(project: Project) -> None:
    root = write_data(project.folder / "tokens", num_empty=7)
    settings = [*SMALL_GPT, "data=padded_tokens", f"data.root={root}", f"trainer.global_batch_size={GLOBAL_BATCH}", "model.vocab_size=31"]
    settings += [
        "model.num_layers=3",
        "loader.micro_batch_size=2",
        "trainer.max_steps=5",
        "trainer.max_epochs=null",
        "~metrics.tensorboard",
    ]
    settings += ["strategy=fsdp", "cluster=cpu", "cluster.processes_per_node=2", "trainer.log_every_steps=1"]
    curves = {}
    for name, beside in {"alone": [], **BESIDE}.items():
        done = project.run(*settings, *beside, f"hydra.run.dir=outputs/{name}", timeout=300)
        assert done.returncode == 0, done.output
        curves[name] = [record["loss"] for record in metrics(project.folder / f"outputs/{name}")]
    for name, curve in curves.items():
        assert curve == (pytest.approx(curves["alone"], rel=1e-5) if name in ("compile", "both") else curves["alone"]), name
    assert "1 graph" in (project.folder / "outputs/compile/logs/rank_00000.log").read_text()
    (trace,) = (project.folder / "outputs/profile/profile").glob("rank_00000*.json.gz")
    assert "FSDP::all_gather" in gzip.decompress(trace.read_bytes()).decode()
