"""A batch that grows (`trainer.batch_size_schedule`): the same on any number of ranks, stopped and killed where its size changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]

COMMAND = [
    *(*TINY, "cluster=cpu", "trainer.max_steps=14", "trainer.max_epochs=null", "loader.micro_batch_size=8"),
    *(
        "trainer.global_batch_size=24",
        "trainer.batch_size_schedule={5: 48, 10: 65}",
        "evaluation.every_steps=7",
        "checkpoint.every_steps=4",
    ),
]


def values(run: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record.get(name) for name in ("split", "step", "samples", *names)) for record in metrics(run)]


def test_two_and_three_ranks_have_the_same_curve_and_a_stop_beside_the_change_of_size_none_of_its_own(project: Project) -> None:
    for ranks in (2, 3):
        done = project.run(*COMMAND, f"cluster.processes_per_node={ranks}", f"hydra.run.dir=outputs/{ranks}", timeout=400)
        assert done.returncode == 0, done.output
    two, three = (project.folder / "outputs" / f"{ranks}" for ranks in (2, 3))
    assert values(two) == values(three)
    sizes = [record["samples"] for record in metrics(two, "train")]
    assert [after - before for before, after in zip([0, *sizes[:-1]], sizes, strict=True)] == [24] * 5 + [48] * 5 + [65] * 4
    for name in ("loss", "accuracy"):
        mine, theirs = ([record[name] for record in metrics(run) if name in record] for run in (two, three))
        assert theirs == pytest.approx(mine, rel=1e-5)

    parts = project.folder / "outputs" / "parts"
    command = [*COMMAND, "cluster.processes_per_node=3", "hydra.run.dir=outputs/parts"]
    stopped = project.run(
        *command, "debug.faults=[{kind: sigterm, rank: 1, step: 4}]", timeout=400
    )  # within the last step of the first size
    assert stopped.returncode == 75, stopped.output
    killed = project.run("resume", str(parts), "debug.faults=[{kind: kill, rank: 2, step: 11}]", timeout=400)  # saved after step 8
    assert killed.returncode not in (0, 75), killed.output
    resumed = project.run("resume", str(parts), "debug.faults=[]", timeout=400)
    assert resumed.returncode == 0, resumed.output
    assert values(parts, "loss", "lr", "grad_norm") == values(three, "loss", "lr", "grad_norm")


def test_windows_in_pieces_are_the_same_on_two_and_three_ranks_and_after_a_kill(project: Project) -> None:
    """`trainer.length_schedule`, beside a batch that grows."""
    text = project.write("text.txt", "whether tis nobler in the mind to suffer the slings and arrows " * 30)
    command = ["data=char_text", f"data.path={text}", "data.context_length=16", "data.stride=4", "model=gpt", "model.num_layers=1"]
    command += ["model.num_heads=2", "model.width=16", "objective=language_modeling", "cluster=cpu", "~metrics.tensorboard"]
    command += ["loader.micro_batch_size=4", "trainer.global_batch_size=10", "trainer.batch_size_schedule={4: 20}", "trainer.max_steps=8"]
    command += ["trainer.length_schedule={0: 4, 3: 8, 6: 16}", "trainer.log_every_steps=1", "trainer.max_epochs=null", "data.eval=null"]
    command += ["checkpoint.every_steps=2"]
    for ranks in (2, 3):
        done = project.run(*command, f"cluster.processes_per_node={ranks}", f"hydra.run.dir=outputs/{ranks}", timeout=400)
        assert done.returncode == 0, done.output
    assert "windows of 16 tokens, in pieces of 4 from step 0 on, 8 from step 3 on, 16 from step 6 on" in done.output
    two, three = (metrics(project.folder / "outputs" / f"{ranks}", "train") for ranks in (2, 3))
    assert [record["samples"] for record in two] == [record["samples"] for record in three]
    assert [record["loss"] for record in three] == pytest.approx([record["loss"] for record in two], rel=1e-5)

    again = project.folder / "outputs" / "again"
    fault = "debug.faults=[{kind: kill, rank: 1, step: 5}]"
    killed = project.run(*command, "cluster.processes_per_node=3", "hydra.run.dir=outputs/again", fault, timeout=400)
    assert killed.returncode not in (0, 75), killed.output
    resumed = project.run("resume", str(again), "debug.faults=[]", timeout=400)
    assert resumed.returncode == 0, resumed.output
    names = ("loss", "lr", "grad_norm")
    assert values(again, *names) == values(project.folder / "outputs" / "3", *names)
