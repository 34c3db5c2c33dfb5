"""Lightning's Trainer, as its documentation shows it; it starts its processes itself.

In the tier `user` everything is as it comes: TensorBoard, checkpoint, progress bar, model summary. In `equal` all of that is off, and one
checkpoint is saved at the end, as by the others.

python with_lightning.py WORKLOAD TIER STEPS PROCESSES
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from workloads import Task


class Classifier(lightning.LightningModule):
    """The model of the workload, and its loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.net = task, task.workload.model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.task.workload.loss(self.net(batch[0]), batch[1])
        if not self.task.is_equal:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    def train_dataloader(self) -> Any:
        if self.task.is_equal:
            return self.task.batches(self.global_rank)
        return DataLoader(self.task.dataset(), self.task.workload.batch_size, shuffle=True)


def main() -> None:
    task = Task.of_command()
    lightning.seed_everything(0)
    strategy: Any = "auto" if task.processes == 1 else "ddp"
    options: dict[str, Any] = {}
    if task.is_equal:
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
        options = dict.fromkeys(off, False)
        strategy = strategy if task.processes == 1 else DDPStrategy(gradient_as_bucket_view=True, static_graph=True)
    trainer = lightning.Trainer(accelerator="cpu", devices=task.processes, strategy=strategy, max_epochs=1, **options)
    trainer.fit(Classifier(task))
    if task.is_equal:
        trainer.save_checkpoint("checkpoint.ckpt")


if __name__ == "__main__":
    main()
