"""The limit: a script of torch alone, as a careful person writes it. Under torchrun, or for one process without.

python with_torch.py WORKLOAD TIER STEPS PROCESSES
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import LOG_EVERY_STEPS, Task


def main() -> None:
    task = Task.of_command()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = task.workload.model()
    module: nn.Module = model
    if world_size > 1:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    running = torch.zeros(())
    for step, (inputs, targets) in enumerate(batches(task, rank, world_size), start=1):
        loss = task.workload.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if step % LOG_EVERY_STEPS == 0:
            mean = running.item() / LOG_EVERY_STEPS
            running.zero_()
            if rank == 0:
                print(f"step {step} loss {mean:.4f}", flush=True)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    if world_size > 1:
        dist.destroy_process_group()


def batches(task: Task, rank: int, world_size: int) -> Iterable[Any]:
    """Return this rank's batches."""
    if task.is_equal:
        return task.batches(rank)
    dataset = task.dataset()
    if world_size == 1:
        return DataLoader(dataset, task.workload.batch_size, shuffle=True)
    return DataLoader(dataset, task.workload.batch_size, sampler=DistributedSampler(dataset))


if __name__ == "__main__":
    main()
