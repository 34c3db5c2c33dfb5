"""From text to a trained model, by the commands that a user types."""

from __future__ import annotations

import pytest

from tests.conftest import Project, metrics
from tests.unit.data_files import TEXT

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_prepared_tokens_train_a_gpt_on_two_processes_with_workers(project: Project) -> None:
    project.write("a.txt", TEXT * 2)
    prepared = project.run("prepare", "tokens", "a.txt", "to=tokens", "val_fraction=0.1")
    assert prepared.returncode == 0, prepared.output
    command = next(line for line in prepared.stdout.splitlines() if line.startswith("train    ddp-train")).split()[2:]
    tiny = ["data.context_length=16", "loader.num_workers=1", "model.num_layers=1", "model.num_heads=1", "model.width=8", "cluster=cpu"]
    done = project.run(*command, *tiny, "trainer.max_steps=4", "trainer.log_every_steps=1", "~metrics.tensorboard", "scheduler=constant")
    assert done.returncode == 0, done.output
    assert [record["step"] for record in metrics(project.the_run(), "train")] == [1, 2, 3, 4]
    (evaluation,) = metrics(project.the_run(), "eval")
    assert {"loss", "perplexity", "bits_per_byte"} <= evaluation.keys()
