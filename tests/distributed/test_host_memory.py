"""Under fsdp rank 0 alone holds the whole model on its host; weights and losses are those of ranks that each make it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import FEW, Project, metrics

pytestmark = pytest.mark.distributed

OWN = """
import gc, json
import torch
import torch.distributed as dist
from torch import nn

most = 0  # bytes of all tensors of this process, while it takes weights
_broadcast = dist.broadcast


def broadcast(tensor, src):
    global most
    _broadcast(tensor, src=src)
    if tensor.ndim == 2:
        held = [each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta]
        most = max(most, sum({each.data_ptr(): each.nbytes() for each in held}.values()))


class Deep(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        dist.broadcast = broadcast
        self.register_buffer("shift", torch.rand(768))
        self.blocks = nn.ModuleList([nn.Linear(768, 768) for _ in range(12)])  # 2.4 MB each
        self.head = nn.Linear(768, 10)
        self.head.weight.data.mul_(0.5)
        if reads:
            float(self.head.weight.sum())  # then each rank makes it
        self.made_on = str(self.head.weight.device)

    def forward(self, images):
        hidden = images.flatten(1) + self.shift
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


class Notes:
    def on_start(self, run):
        held = sum(each.to_local().nbytes for each in run.model.parameters())
        with open(f"{run.folder}/rank_{run.rank}.json", "w") as file:
            json.dump({"made_on": run.model.made_on, "most": most, "held": held}, file)
"""
BLOCK, WHOLE = 769 * 768 * 4, 12 * 769 * 768 * 4  # bytes
USE = ["model=custom", "model._target_=own.Deep", "trainer.max_steps=3", "trainer.global_batch_size=24", "strategy=fsdp", "cluster=cpu"]


def trained(project: Project, name: str, *words: str, ranks: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Return all losses and norms, and what each rank has noted."""
    run = f"hydra.run.dir=outputs/{name}"
    done = project.run(*FEW, *USE, "+callbacks.notes._target_=own.Notes", f"cluster.processes_per_node={ranks}", run, *words, timeout=200)
    assert done.returncode == 0, done.output
    folder = project.folder / "outputs" / name
    noted = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    return [record[key] for record in metrics(folder) for key in ("loss", "grad_norm") if key in record], noted


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_other_than_0_never_hold_the_whole_model(project: Project, ranks: int) -> None:
    project.write("own.py", OWN)
    losses, noted = trained(project, "filled", ranks=ranks)
    assert [rank["made_on"] for rank in noted] == ["cpu", *["meta"] * (ranks - 1)]
    first, *others = (rank["most"] for rank in noted)
    assert first > WHOLE
    assert max(others) < WHOLE / ranks + 2 * BLOCK, f"its share, and a block that is to be cut: {noted}"
    same, made = trained(project, "made", "+model.reads=true", ranks=ranks)
    assert [rank["made_on"] for rank in made] == ["cpu"] * ranks
    assert min(rank["most"] for rank in made) > WHOLE
    assert losses == same
    assert len(losses) == 3 * 2 + 1
