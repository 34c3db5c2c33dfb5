"""Lightning Fabric, as its documentation shows it; it starts its processes itself.

python with_fabric.py WORKLOAD TIER STEPS PROCESSES
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader
from workloads import LOG_EVERY_STEPS, Task


def main() -> None:
    task = Task.of_command()
    strategy: Any = "auto" if task.processes == 1 else "ddp"
    if task.is_equal and task.processes > 1:
        strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
    fabric = Fabric(accelerator="cpu", devices=task.processes, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = task.workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    running = torch.zeros(())
    for step, (inputs, targets) in enumerate(batches(task, fabric), start=1):
        loss = task.workload.loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % LOG_EVERY_STEPS == 0:
            fabric.print(f"step {step} loss {running.item() / LOG_EVERY_STEPS:.4f}", flush=True)
            running.zero_()
    fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})


def batches(task: Task, fabric: Fabric) -> Iterable[Any]:
    """Return this rank's batches."""
    if task.is_equal:
        return task.batches(fabric.global_rank)
    loader: Iterable[Any] = fabric.setup_dataloaders(DataLoader(task.dataset(), task.workload.batch_size, shuffle=True))
    return loader


if __name__ == "__main__":
    main()
