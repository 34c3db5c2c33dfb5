"""Whether sums are sums: what an objective gives of some samples doubles when the same samples come twice. A mean stays what it was.

Trained on, a mean gives 1/B of the gradient, and another one for every split into micro-batches and ranks. Added up by an evaluation, it
gives the metric as often as there are batches and ranks. Tried before the first step (`sanity_check`), in evaluation mode.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Indices, batch_size, map_tensors, note_size, whole_loss
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch, as_micro_batch
from ddp_train.objective.loss import LossObjective
from ddp_train.training.parts.components import Components

logger = logging.getLogger(__name__)

_MAX_SAMPLES = 32
_AT_RANDOM = 0.05  # what differs by more from one time to the next says nothing about sum and mean


def refuse_means(components: Components, loader: Any, micro_batch: MicroBatch, ids: Indices | None, world: World) -> None:
    """Refuse an objective whose loss (in training) or score (in evaluation) is a mean, and a loss function that gives a sum.

    Args:
        loader: whose micro-batch it is.
        ids: its samples; None: not known.
    """
    objective, trains = components.objective, loader is components.train_loader
    kind = type(objective).__name__
    for name, ratio, once, twice in _computed(components, loader, micro_batch, ids, world):
        values = f"{once:.6g} for some samples, {twice:.6g} for the same ones twice"
        if 0.8 < ratio < 1.25:
            raise ConfigError(
                key="objective",
                happened=f"{kind}.loss gives a mean: {values}" if trains else f"{kind}.score gives {name!r} as a mean: {values}",
                expected="a sum, which doubles: it is divided by the weight of the whole global batch, over all ranks and micro-batches"
                if trains
                else "a sum, which doubles: evaluation adds scores up over all batches and ranks, and `metrics` divides",
                fix='reduction="sum", or the mean times what `weight` gives; sanity_check=false if it is meant'
                if trains
                else f"the sum of {name!r} over the samples, and their number under another name; sanity_check=false if it is meant",
            )
        if trains and isinstance(objective, LossObjective) and 3.2 < ratio < 5.0:
            raise ConfigError(
                key="objective",
                happened=f"{getattr(objective.loss_fn, '__name__', type(objective.loss_fn).__name__)} gives the sum over the batch",
                expected="the mean over its samples, as loss functions do: it is multiplied by their number",
                fix="objective.reduction=mean; sanity_check=false if it is meant",
            )


def _computed(
    components: Components, loader: Any, micro_batch: MicroBatch, ids: Indices | None, world: World
) -> Iterator[tuple[str, float, float, float]]:
    """Yield the name of each number of an objective, by how much it grows when samples come twice, and the number of them once and twice.

    Nothing is yielded of numbers that tell nothing: at random, not finite, or 0, as where nothing counts (a batch of padding).
    """
    if not micro_batch.counts:
        return
    objective, model = components.objective, components.model.eval()  # no dropout
    trains, numbers = loader is components.train_loader, []
    try:
        for part in _parts(loader, micro_batch, ids, world):
            batch = batch_on(world.device, part)
            with torch.no_grad(), components.amp.autocast(world.device):
                values = {"loss": whole_loss(objective, model, batch)} if trains else objective.score(model, batch)
            numbers.append({name: float(value.double().sum()) for name, value in values.items()})
    except Exception as error:
        logger.info("not tried whether loss and scores are sums: %s: %s", type(error).__name__, error)
        return
    for name in numbers[0]:
        once, again, twice = (values[name] for values in numbers)
        if all(map(math.isfinite, (once, again, twice))) and abs(once - again) <= _AT_RANDOM * abs(once) and again:
            yield name, twice / again, again, twice


def _parts(loader: Any, micro_batch: MicroBatch, ids: Indices | None, world: World) -> list[MicroBatch]:
    """Return half of a micro-batch, the same again, and that half twice over: of its rows, or read anew where rows are not samples.

    Raises:
        ValueError: it cannot be taken apart.
    """
    batch = batch_on(world.device, micro_batch)
    size = batch_size(note_size(batch, None)) if micro_batch.samples is None else 0
    half = max(1, min(_MAX_SAMPLES, size // 2))

    def rows(tensor: Tensor, *, times: int) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] != size:
            raise ValueError("the batch's tensors do not share one leading dimension")
        return torch.cat([tensor[:half]] * times)

    try:
        return [MicroBatch(map_tensors(partial(rows, times=times), batch), counts=True) for times in (1, 1, 2)]
    except ValueError:
        source = getattr(loader, "source", None)
        if ids is None or source is None:
            raise
        some = ids[: max(1, min(_MAX_SAMPLES, len(ids) // 2))]
        return [as_micro_batch(source.batch(np.tile(some, times)), len(some) * times) for times in (1, 1, 2)]
