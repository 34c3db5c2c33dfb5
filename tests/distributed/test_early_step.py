"""`trainer.optimizer_in_backward` where shards are reduced within backward: the curve of steps after it, to the bit."""

from __future__ import annotations

import pytest

from tests.conftest import FEW, Project, metrics

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def test_fsdp_steps_in_backward_as_it_steps_after_it(project: Project) -> None:
    command = [
        *FEW,
        "model=mlp",
        "model.width=16",
        "cluster=cpu",
        "cluster.processes_per_node=3",
        "strategy=fsdp",
        "strategy.blocks=[Linear]",
    ]
    command += ["trainer.max_steps=6", "trainer.max_epochs=null", "checkpoint.every_steps=3", "trainer.global_batch_size=70"]
    found = []
    for name, early in (("early", "true"), ("late", "false")):
        done = project.run(*command, f"trainer.optimizer_in_backward={early}", f"hydra.run.dir=outputs/{name}", timeout=300)
        assert done.returncode == 0, done.output
        records = metrics(project.folder / "outputs" / name)
        found.append([tuple(record.get(key) for key in ("split", "step", "loss", "grad_norm")) for record in records])
    assert found[0] == found[1]
