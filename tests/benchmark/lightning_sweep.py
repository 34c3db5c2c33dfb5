"""A sweep with Lightning and Hydra's basic launcher, as a user of lightning-hydra-template writes it; for sweep_overhead.py.

    python tests/benchmark/lightning_sweep.py -m model.optimizer.lr=0.1,0.01

The same model, data, batches, optimizer and schedule as `ddp-train model=mlp cluster=cpu`, two processes, one evaluation and one
checkpoint at the end. Progress bar and model summary are off, which is in its favour.

Strategies under -m, as seen with Lightning 2.6.6 and Hydra's basic sweeper:
- ddp works for a grid, although its child runs the whole command line again (Lightning issue 11300): both processes go through the same
  jobs in lockstep, in one process group that stays (two ranks, equal weights after every job). Without a fixed hydra.sweep.dir the child
  makes a second sweep folder, of its own time. It is the one with the smallest gap.
- ddp_fork and ddp_notebook (the same) fork two processes for every job; CPU only, once the parent has touched a GPU they cannot.
- ddp_spawn starts them anew, several seconds a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hydra
import lightning
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_train.data.synthetic_images import SyntheticImages

Batch = tuple[Tensor, Tensor]


class Classifier(lightning.LightningModule):
    """Cross entropy and accuracy. Rank 0 notes the time at the end of every step."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], stamps: str) -> None:
        super().__init__()
        self.net, self.optimizer, self.stamps = net, optimizer, stamps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.log("val/loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val/accuracy", (logits.argmax(dim=1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.global_rank == 0:
            with open(self.stamps, "a") as file:
                file.write(f"{time.time()}\n")


class Images(lightning.LightningDataModule):
    """The synthetic images that ours trains on; a whole batch is made at once."""

    def __init__(self, batch_size: int, eval_batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size

    def train_dataloader(self) -> DataLoader[Batch]:
        images = _Batched(SyntheticImages(8192))
        return DataLoader(images, self.batch_size, shuffle=True, collate_fn=_as_it_is)

    def val_dataloader(self) -> DataLoader[Batch]:
        images = _Batched(SyntheticImages(2000, "eval"))
        return DataLoader(images, self.eval_batch_size, collate_fn=_as_it_is)


class _Batched(Dataset[Any]):
    def __init__(self, source: SyntheticImages) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.source.batch(indices)  # type: ignore[arg-type]


def _as_it_is(batch: Batch) -> Batch:
    return batch


@hydra.main(version_base="1.3", config_path=".", config_name="lightning_sweep")
def main(cfg: DictConfig) -> float:
    """Train one job and return what a sweeper would compare."""
    lightning.seed_everything(cfg.seed)
    model, data = hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.data)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(model, data)
    return float(trainer.callback_metrics["val/accuracy"])


if __name__ == "__main__":
    main()
