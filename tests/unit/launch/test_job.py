"""What the ranks are given of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.launch.job import Evaluation, Job, Program, Training
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked


def test_the_hyper_parameters_are_what_was_typed(tmp_path: Path) -> None:
    typed = ["optimizer.lr=1e-1", "+model.depth=3", "model=mlp", "~metrics.tensorboard", "hydra.run.dir=x", "name=null", "experiment=mine"]
    tree: Any = {"optimizer": {"lr": 0.1, "eps": 1e-8}, "model": {"depth": 3}, "name": None, "seed": 1}
    config: Any = SimpleNamespace(tree=tree)
    job = Job(config=config, run_folder=RunFolder(tmp_path), command=[], overrides=typed)
    expected = {"optimizer.lr": 0.1, "model.depth": 3, "model": "mlp", "name": "null", "experiment": "mine"}
    assert job.hyper_parameters() == expected


@pytest.mark.parametrize("work", [Training(checkpoint="a"), Evaluation(run="a", checkpoint="b", watches=True), Program(function="a.b")])
def test_a_job_arrives_as_it_was_sent(work: Training | Evaluation | Program, tmp_path: Path) -> None:
    job = Job(config=checked(), run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=["seed=1"], work=work)
    received = Job.from_json(job.to_json())
    assert (received.work, received.is_run) == (work, not isinstance(work, Program))
    assert received.begins_at == (Path("a") if isinstance(work, Training) else tmp_path)
    assert received.to_json() == job.to_json() == received.resumed_at(received.begins_at).to_json()
