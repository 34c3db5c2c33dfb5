"""Documents of different lengths: the gradient and the run do not depend on the number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from tests.conftest import Project, metrics
from tests.unit.data_files import write_tokens

pytestmark = pytest.mark.distributed

SMALL_GPT = [
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.width=16",
    "objective=language_modeling",
    "data.context_length=24",
]
GLOBAL_BATCH = 13  # which nothing divides


def write_data(folder: Path, *, num_empty: int = 0) -> Path:
    """Write 60 documents of very different lengths.

    Args:
        num_empty: how many of the first global batch's documents have no token before their end.
    """
    generator = np.random.default_rng(5)
    lengths = np.minimum(generator.lognormal(2, 1, 60).astype(int) + 1, 60)
    lengths[SampleOrder(Shuffled(60, seed=0), global_batch_size=GLOBAL_BATCH, drop_last=False).indices(0, 0, num_empty)] = 0
    train = [generator.integers(1, 30, length).tolist() for length in lengths]
    val = [generator.integers(1, 30, length).tolist() for length in range(17)]
    return write_tokens(folder, {"train": [train[:25], train[25:]], "val": [val]}, vocab_size=31)


def gradients(project: Project, world_size: int, *overrides: str) -> dict[str, NDArray[np.float32]]:
    """Run gradient_of_a_step.py under torchrun and return what it writes."""
    file = project.folder / f"gradients_{world_size}.npz"
    script = Path(__file__).with_name("gradient_of_a_step.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(script), str(file)]
    done = subprocess.run(
        [*command, *overrides],
        cwd=project.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(np.load(file))


@pytest.mark.parametrize("world_sizes", [(1, 3), pytest.param((2, 4), marks=pytest.mark.long)])
def test_the_gradient_of_a_step_is_that_of_one_process_with_uneven_and_masked_tokens(
    project: Project, world_sizes: tuple[int, ...]
) -> None:
    """Seven of the thirteen documents of the padded batch are empty, so that on 2, 3 and 4 ranks nothing counts on the first."""
    root = write_data(project.folder / "tokens", num_empty=7)
    settings = [*SMALL_GPT, f"data.root={root}", f"trainer.global_batch_size={GLOBAL_BATCH}", "loader.micro_batch_size=2"]
    alone = gradients(project, 1, *settings)
    for world_size in world_sizes:  # 1 to 4: with 7, 4, 3 and 2 micro-batches
        found = alone if world_size == 1 else gradients(project, world_size, *settings)
        for data in ("packed_tokens", "padded_tokens"):
            plain = alone[f"{data}.plain"]
            scale = np.abs(plain).max()
            assert scale > 0.1
            for dtype, tolerance in {"float32": 1e-6, "float32_scaled": 1e-6, "float16": 5e-3}.items():  # float16 has 11 bits
                error = np.abs(found[f"{data}.{dtype}"] - plain).max() / scale
                assert error < tolerance, (world_size, data, dtype)


@pytest.mark.long
def test_a_padded_run_is_the_same_on_one_and_three_processes(project: Project) -> None:
    root = write_data(project.folder / "tokens", num_empty=7)
    for world_size in (1, 3):
        done = project.run(
            *SMALL_GPT,
            "data=padded_tokens",
            f"data.root={root}",
            "loader.micro_batch_size=3",
            "loader.num_workers=1",  # whose batches have a new shape each time
            f"trainer.global_batch_size={GLOBAL_BATCH}",
            "trainer.max_steps=12",
            "trainer.log_every_steps=1",
            "evaluation.every_steps=6",
            "~metrics.tensorboard",
            "cluster=cpu",
            f"cluster.processes_per_node={world_size}",
            f"hydra.run.dir=outputs/{world_size}",
        )
        assert done.returncode == 0, done.output
    alone, three = (metrics(project.folder / "outputs" / str(world_size)) for world_size in (1, 3))
    assert len(alone) == 14
    for mine, theirs in zip(alone, three, strict=True):
        assert (mine["split"], mine["step"], mine["samples"]) == (theirs["split"], theirs["step"], theirs["samples"])
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
