"""The first global batch of the training data, again and again: `debug.overfit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch

from ddp_train.interfaces import Indices, map_tensors
from ddp_train.loader.loader import Loader
from ddp_train.loader.order import BatchOrder
from ddp_train.loader.reader import MicroBatch


class OneBatch:
    """Gives this rank's micro-batches of a loader's first step in every step: the same tensors, augmented as they were the first time.

    Steps and epochs are counted as the loader counts them, so that schedules are those of the whole run.

    Args:
        loader: whose batches all have the same size (`drop_last`), as the one that is given has.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.grad_accum_steps, self.skips = loader.grad_accum_steps, loader.skips
        self.source = getattr(loader, "source", None)  # which data with positions has

    @property
    def order(self) -> BatchOrder:
        return self._loader.order

    def micro_batches(self, samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the first step for ever."""
        first = list(islice(self._loader.micro_batches(0), self.grad_accum_steps))
        for micro_batch in cycle(first):
            yield micro_batch._replace(batch=map_tensors(torch.clone, micro_batch.batch))  # a model may change its inputs in place

    def micro_steps(self, samples: int) -> int:
        """Return how many micro-batches a step has: always as many."""
        return self.grad_accum_steps

    def peek(self) -> MicroBatch:
        """Return this rank's very first micro-batch."""
        return self._loader.peek()

    def of_size(self, size: int) -> MicroBatch:
        """Return so many samples as one micro-batch."""
        return self._loader.of_size(size)

    def sample_ids(self, samples: int, number: int) -> Indices | None:
        """Return what this rank's micro-batch `number` of every step is made of; None: samples have no numbers."""
        return self._loader.sample_ids(0, number)

    def state_dict(self, samples: int) -> dict[str, Any]:
        """The data begins with the same batch wherever the run goes on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is none."""

    def used(self, samples: int) -> dict[str, int]:
        """It is always the same batch."""
        return {}

    def caveats(self, samples: int) -> list[str]:
        """Say that there is no other batch."""
        return ["debug.overfit: the first global batch is trained on, again and again"]
