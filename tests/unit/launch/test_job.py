"""What the ranks are given of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddp_train.launch.job import Job
from ddp_train.run_folder.paths import RunFolder


def test_the_hyper_parameters_are_what_was_typed(tmp_path: Path) -> None:
    typed = ["optimizer.lr=1e-1", "+model.depth=3", "model=mlp", "~metrics.tensorboard", "hydra.run.dir=x", "name=null", "experiment=mine"]
    tree: Any = {"optimizer": {"lr": 0.1, "eps": 1e-8}, "model": {"depth": 3}, "name": None, "seed": 1}
    config: Any = SimpleNamespace(tree=tree)
    job = Job(config=config, run_folder=RunFolder(tmp_path), command=[], overrides=typed)
    expected = {"optimizer.lr": 0.1, "model.depth": 3, "model": "mlp", "name": "null", "experiment": "mine"}
    assert job.hyper_parameters() == expected
