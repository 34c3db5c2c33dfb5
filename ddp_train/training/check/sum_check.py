"""Whether sums are sums: what an objective gives of some samples doubles when the same samples come twice. A mean stays what it was.

Trained on, a mean gives 1/B of the gradient, and another one for every split into micro-batches and ranks. Added up by an evaluation, it
gives the metric as often as there are batches and ranks. Tried before the first step (`sanity_check`), in evaluation mode.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Indices, batch_size, map_tensors, note_size, whole_loss
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch, as_micro_batch
from ddp_train.objective.loss import LossObjective
from ddp_train.training.parts.components import Components

logger = logging.getLogger(__name__)

_MOST = 32  # samples
_AT_RANDOM = 0.05  # what differs by more from one time to the next says nothing about sum and mean


def refuse_mean_loss(components: Components, micro_batch: MicroBatch, ids: Indices | None, world: World) -> None:
    """Refuse an objective whose loss is a mean, and a loss function that gives a sum.

    Args:
        ids: the samples of the micro-batch; None: not known.

    Raises:
        ConfigError: it is one.
    """
    objective = components.objective
    try:
        with torch.no_grad():
            once, again, twice = (
                float(_computed(components, part, world, whole_loss)) for part in _parts(components.train_loader, micro_batch, ids, world)
            )
    except Exception as error:
        logger.info("not tried whether the loss is a sum: %s: %s", type(error).__name__, error)
        return
    ratio = _ratio(once, again, twice)
    if 0.8 < ratio < 1.25:
        raise ConfigError(
            key="objective",
            happened=f"{type(objective).__name__}.loss gives a mean: {again:.6g} for some samples, {twice:.6g} for the same ones twice",
            expected="a sum, which doubles: it is divided by the weight of the whole global batch, over all ranks and micro-batches",
            fix='reduction="sum", or the mean times what `weight` gives; sanity_check=false if it is meant',
        )
    if isinstance(objective, LossObjective) and 3.2 < ratio < 5.0:
        name = getattr(objective.loss_fn, "__name__", type(objective.loss_fn).__name__)
        raise ConfigError(
            key="objective",
            happened=f"{name} gives the sum over the batch",
            expected="the mean over its samples, as loss functions do: it is multiplied by their number",
            fix="objective.reduction=mean; sanity_check=false if it is meant",
        )


def refuse_mean_scores(components: Components, loader: Any, micro_batch: MicroBatch, ids: Indices | None, world: World) -> None:
    """Refuse an objective whose `score` gives a mean, as accuracy: evaluation adds scores up over batches and ranks.

    Args:
        loader: of the evaluation set.
        ids: the samples of the micro-batch; None: not known.

    Raises:
        ConfigError: it does.
    """
    objective = components.objective
    if not micro_batch.counts:
        return
    try:
        with torch.no_grad():
            found = [_computed(components, part, world, _scores) for part in _parts(loader, micro_batch, ids, world)]
        sums = [{name: float(value.double().sum()) for name, value in scores.items()} for scores in found]
    except Exception as error:
        logger.info("not tried whether the scores are sums: %s: %s", type(error).__name__, error)
        return
    for name in sums[0]:
        once, again, twice = (each[name] for each in sums)
        if 0.8 < _ratio(once, again, twice) < 1.25:
            raise ConfigError(
                key="objective",
                happened=f"{type(objective).__name__}.score gives {name!r} as a mean: {again:.6g} for some samples, {twice:.6g} for the"
                " same ones twice",
                expected="a sum, which doubles: evaluation adds scores up over all batches and ranks, and `metrics` divides",
                fix=f"the sum of {name!r} over the samples, and their number under another name; sanity_check=false if it is meant",
            )


def _scores(objective: Any, model: Any, batch: Batch) -> Mapping[str, Tensor]:
    scores: Mapping[str, Tensor] = objective.score(model, batch)
    return scores


def _computed(components: Components, part: MicroBatch, world: World, compute: Any) -> Any:
    components.model.eval()  # no dropout
    with components.amp.autocast(world.device):
        return compute(components.objective, components.model, batch_on(world.device, part))


def _parts(loader: Any, micro_batch: MicroBatch, ids: Indices | None, world: World) -> list[MicroBatch]:
    """Return half of a micro-batch, the same again, and that half twice over: of its rows, or read anew where rows are not samples.

    Raises:
        ValueError: it cannot be taken apart.
    """
    batch = batch_on(world.device, micro_batch)
    size = batch_size(note_size(batch, None)) if micro_batch.samples is None else 0
    half = max(1, min(_MOST, size // 2))

    def taken(tensor: Tensor, *, times: int) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] != size:
            raise ValueError("the batch's tensors do not share one leading dimension")
        return torch.cat([tensor[:half]] * times)

    try:
        return [MicroBatch(map_tensors(partial(taken, times=times), batch), counts=True) for times in (1, 1, 2)]
    except ValueError:
        source = getattr(loader, "source", None)
        if ids is None or source is None:
            raise
        some = ids[: max(1, min(_MOST, len(ids) // 2))]
        return [as_micro_batch(source.batch(np.tile(some, times)), len(some) * times) for times in (1, 1, 2)]


def _ratio(once: float, again: float, twice: float) -> float:
    """Return by how much it grows when samples come twice; 0 where that tells nothing, as where nothing counts (a batch of padding)."""
    if not all(map(math.isfinite, (once, again, twice))) or abs(once - again) > _AT_RANDOM * abs(once) or not again:
        return 0.0
    return twice / again
