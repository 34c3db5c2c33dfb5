"""Hugging Face Accelerate, as its documentation shows it. Under torchrun, or for one process without.

python with_accelerate.py WORKLOAD TIER STEPS PROCESSES
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from workloads import LOG_EVERY_STEPS, Task


def main() -> None:
    task = Task.of_command()
    options = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)] if task.is_equal else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=options)
    set_seed(0)
    model = task.workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    running = torch.zeros(())
    for step, (inputs, targets) in enumerate(batches(task, accelerator), start=1):
        loss = task.workload.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % LOG_EVERY_STEPS == 0:
            accelerator.print(f"step {step} loss {running.item() / LOG_EVERY_STEPS:.4f}", flush=True)
            running.zero_()
    accelerator.wait_for_everyone()
    accelerator.save({"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    accelerator.end_training()


def batches(task: Task, accelerator: Accelerator) -> Iterable[Any]:
    """Return this rank's batches."""
    if task.is_equal:
        return task.batches(accelerator.process_index)
    loader: Iterable[Any] = accelerator.prepare(DataLoader(task.dataset(), task.workload.batch_size, shuffle=True))
    return loader


if __name__ == "__main__":
    main()
