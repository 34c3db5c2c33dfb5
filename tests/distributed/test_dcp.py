"""Weights of a run whose ranks have rows of each go to torch's distributed checkpoints, and those that torch's ranks write come back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from tests.conftest import TINY, Project

pytestmark = [pytest.mark.distributed, pytest.mark.long]

THEIRS = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from ddp_train.model.mlp import MLP
from ddp_train.system.process import exit_at_once

dist.init_process_group("gloo")
model = MLP((3, 16, 16), 10, width=16)
fully_shard(model)
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1])
dcp.save({**state, "step": torch.tensor(3)}, checkpoint_id=sys.argv[2])
dist.barrier()
exit_at_once(0)
"""


def test_weights_go_to_dcp_on_several_ranks_and_come_back_to_the_bit(project: Project) -> None:
    project.write("theirs.py", THEIRS)
    run = [*TINY, "trainer.max_steps=3", "strategy=fsdp", "cluster=cpu", "cluster.processes_per_node=2", "hydra.run.dir=run"]
    for words in (run, ["export", "run", "to=ours.safetensors"], ["export", "run", "--format=dcp", "to=given"]):
        done = project.run(*words)
        assert done.returncode == 0, done.output
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "theirs.py", "given", "taken"]
    subprocess.run(torchrun, cwd=project.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    assert len(list((project.folder / "taken").glob("*.distcp"))) == 2
    done = project.run("prepare", "weights", "taken", "to=back.safetensors", "--unpickle")
    assert done.returncode == 0, done.output
    ours, back = (safetensors.torch.load_file(project.folder / f"{name}.safetensors") for name in ("ours", "back"))
    assert ours.keys() == back.keys()
    assert all(torch.equal(value, back[name]) for name, value in ours.items())
    done = project.run(*run[:-1], "hydra.run.dir=next", "init_from=back.safetensors")
    assert done.returncode == 0, done.output
