"""Ranks that take steps of their own: what they exchange and when, what is saved of each, and how well the whole learns."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, metrics
from tests.distributed.test_token_exactness import GLOBAL_BATCH, SMALL_GPT, write_data

pytestmark = pytest.mark.distributed

TEXT = Path(__file__).parents[2] / "LICENSE"  # to learn from where there is no larger one; it does not change


def run_all(project: Project, world_size: int, *overrides: str) -> dict[str, Any]:
    script = Path(__file__).with_name("runs_apart.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(script)]
    folder = project.folder / "runs"
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT.read_text())
    done = subprocess.run(
        [*command, str(folder), *overrides],
        cwd=project.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{world_size}.json").read_text())
    return found


@pytest.mark.parametrize("world_sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.long)])
def test_ranks_step_apart_meet_and_go_on_from_where_each_was(project: Project, world_sizes: tuple[int, ...]) -> None:
    """With padded documents, of whose weights a rank knows its own; accumulation, clipping, averages, a block that thaws, tied weights."""
    root = write_data(project.folder / "tokens", num_empty=7)
    settings = [*SMALL_GPT, "data=padded_tokens", f"data.root={root}", f"trainer.global_batch_size={GLOBAL_BATCH}"]
    settings += ["loader.micro_batch_size=2", "trainer.max_steps=9", "model.vocab_size=31"]
    for world_size in world_sizes:
        found = run_all(project, world_size, *settings)
        # A synchronisation after every step is ddp, for an optimizer whose step is linear in the gradient.
        for mine, theirs in zip(found["every step"]["records"], found["ddp"]["records"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5), mine
        whole = found["apart"]
        assert len(set(whole["weights"])) == world_size  # the ninth step comes after the synchronisation of the eighth
        assert found["rarely logged"]["exchanges"] == [0, 4, 8, 9]  # the start, two synchronisations, the last record
        assert found["is mean"] == [True, True]
        for step in (3, 4):
            resumed = found[f"from apart_{world_size} {step}"]
            assert resumed["records"] == whole["records"][-len(resumed["records"]) :]  # to the bit
            assert resumed["weights"] == whole["weights"]
        # After five synchronisations; the test below has a hundred, and the 3 % that are promised.
        assert found["learning"]["local_sgd"] == pytest.approx(found["learning"]["ddp"], rel=0.05 if world_size < 4 else 0.1)
        assert found["learning"]["local_sgd"] != found["learning"]["ddp"]
        for name in (name for name in found if name.startswith("from ") or name == "zero1"):
            last = found[name]["records"][-1]
            assert last["step"] == 9 and math.isclose(last["loss"], whole["records"][-1]["loss"], rel_tol=0.05), name


@pytest.mark.data
def test_twenty_steps_apart_learn_shakespeare_as_well_as_ddp(project: Project, data_folder: Callable[[str], Path]) -> None:
    """With DiLoCo's outer optimizer. docs/decisions/0059 has what comes of other settings: APART and APART_STEPS are for them."""
    path = data_folder("text/tinyshakespeare.txt")
    run = ["experiment=shakespeare_gpt_cpu", f"data.path={path}", "cluster=cpu", "cluster.processes_per_node=2", "~metrics.tensorboard"]
    run += [f"trainer.max_steps={os.environ.get('APART_STEPS', 2000)}", "evaluation.every_steps=500"]
    apart = os.environ.get("APART", "strategy.every_steps=20").split()
    losses = {}
    for name, own in {"ddp": [], "local_sgd": apart}.items():
        done = project.run(*run, f"strategy={name}", *own, f"hydra.run.dir=outputs/{name}", timeout=1800)
        assert done.returncode == 0, done.output
        losses[name] = [record["loss"] for record in metrics(project.folder / "outputs" / name, "eval")]
    print(losses)
    assert losses["local_sgd"][-1] == pytest.approx(losses["ddp"][-1], rel=0.03)
