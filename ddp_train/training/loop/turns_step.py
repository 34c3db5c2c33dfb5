"""A step in which parts of an objective take turns (`parts/turn.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ddp_train.interfaces import Batch
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop.train_step import TrainStep, Weight
from ddp_train.training.parts.turn import Turn


class TurnsStep(TrainStep):
    """Lets the turns of a step descend one after the other, each over all micro-batches."""

    _turn: Turn

    def descend(self, micro_batches: Iterable[MicroBatch], weight: Weight, *, measures_norm: bool) -> Tensor | None:
        """Return the norm over all turns. A step in which one was not finite takes no further turn (`guard`)."""
        components, every = self.components, [*micro_batches]
        turns = components.turns_at(self.state.step)
        self.window.begin_turns(turn.name for turn in turns)
        norm: Tensor | None = None
        for self._turn in turns:
            with self._turn.alone():
                self.guard.begin()
                self.compute_gradients(self._turn.module, every, weight)
                own = self.measure_and_clip(measures_norm=measures_norm)
                norm = own if norm is None or own is None else torch.hypot(norm, own)
                self.guard.step(components.optimizer, components.scaler, norm, turn=self._turn.name)
                components.scaler.update()
                components.zero_gradients()
        return norm

    def loss(self, batch: Batch) -> Tensor:
        return self.components.loss(batch, self._turn)

    def add_loss(self, loss_sum: Tensor) -> None:
        self.window.add(loss_sum, turn=self._turn.name)
