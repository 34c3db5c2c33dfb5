"""Two ranks of gloo whose loss compares all samples: `python -m tests.unit.interfaces.gathering` prints the gradients of each, as JSON.

This process imports, computes nothing, and forks each rank: threads that have computed would not be there after a fork.
"""

from __future__ import annotations

import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.interfaces import LossModule
from ddp_train.objective.contrastive import Contrastive

RANKS, SAMPLES = 2, 6


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(5, 4).double(), (torch.randn(SAMPLES, 5).double(), torch.randn(SAMPLES, 5).double())


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], *, is_wrapped: bool) -> list[float]:
    module: nn.Module = LossModule(model, Contrastive(gathers=True), has_state=False)
    wrapped = DistributedDataParallel(module) if is_wrapped else module  # which must be there in backward, too
    loss = wrapped(batch)
    size = RANKS if is_wrapped else 1  # DDP takes the mean of the ranks' gradients, and the sum is wanted
    (loss.total * size / (loss.num_units * size)).backward()
    return [number for parameter in model.parameters() for number in parameter.grad.flatten().tolist()]  # type: ignore[union-attr]


def be(rank: int, store: str) -> dict[str, object]:
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    model, batch = model_and_batch()
    rows = slice(rank * SAMPLES // RANKS, (rank + 1) * SAMPLES // RANKS)
    of_part = tuple(view[rows] for view in batch)
    tried = Contrastive(gathers=True).gather(of_part[0])  # outside of a step: no other rank may be here
    found = gradient(model, of_part, is_wrapped=True)  # type: ignore[arg-type]
    return {"rank": rank, "tried": len(tried), "gradient": found}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            if not (child := os.fork()):
                os.write(1, (json.dumps(be(rank, f"{folder}/store")) + "\n").encode())  # a line at once
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS, "a rank says why above"


if __name__ == "__main__":
    main()
