"""Specs as the commands of users make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.launch.spec import Spec
from ddp_train.launch.submit import spec_of
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked


def spec(run: Path, *overrides: str, **changes: Any) -> Spec:
    """Return the spec of a run on CPU machines of a SLURM cluster, submitted from /work."""
    config = checked("cluster=slurm", "cluster.device=cpu", *overrides, base=["model=mlp", "data.num_samples=640"])
    job = Job(config=config, run_folder=RunFolder(run), command=["ddp-train"], overrides=list(overrides))
    frozen = spec_of(job, Code(folder=f"{run}/launch/code", hash="0" * 64, roots=("src", ".")))
    options = {**frozen.engine_options, "python": "/opt/python", **changes}
    return Spec(**{**vars(frozen), "working_directory": "/work", "token": "0" * 32, "engine_options": options})
