"""Random numbers for a step of your own, by the sample: noise of a diffusion model, masks, the latent of a VAE.

What a sample gets depends on the seed, its place in the run's order, and which draw of the step it is. So it is the same for any number of
ranks, for any size of the micro-batch, and after a resume; in an evaluation, the same in each, and in each turn of a step. torch's own
generators are each rank's.

For data without positions (a stream), and outside of a run, torch draws. In a part of the model that is computed again for its backward
(activation checkpointing) a draw would be another one the second time: it is refused there.

Shapes: B samples of the batch. 64 bits make two numbers of 24 bits each, by SplitMix64 as in `hashing`.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ddp_train.hashing import GOLDEN, random_bits
from ddp_train.interfaces.batch import Batch, batch_size

_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)  # SplitMix64's, as signed numbers
_STEP = int(GOLDEN) - (1 << 64)
_LOW, _UNIT = (1 << 24) - 1, 2.0**-24


class Source:
    """Where the numbers of one micro-batch come from; within it, the functions below draw from it.

    Args:
        place: where in the run the micro-batch begins, in samples, or what returns it; None: its samples have no places.
        pieces: rows of the batch that are one sample.
    """

    def __init__(
        self, seed: int, place: int | Callable[[], int | None] | None, batch: Batch, device: torch.device, *, pieces: int = 1
    ) -> None:
        self._seed, self._place, self._batch, self._pieces, self.device = seed, place, batch, pieces, device
        self._draws = 0

    def keys(self, size: int) -> Tensor | None:
        """Return 64 random bits for each sample, int64 [B], others at each call; None: torch is to draw."""
        if size != (expected := batch_size(self._batch)):
            raise ValueError(f"a draw by the sample begins with the number of samples, {expected}, and not with {size}")
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("a draw by the sample within backward: draw in the objective, and not where activations are computed again")
        first = self._place() if callable(self._place) else self._place
        if first is None:
            return None
        sample, piece = np.divmod(np.arange(size, dtype=np.uint64), np.uint64(self._pieces))
        of_rows = random_bits(random_bits(np.asarray([self._seed], np.uint64), 0) + np.uint64(first) + sample, piece)
        self._draws += 1
        return torch.from_numpy(random_bits(of_rows, self._draws).view(np.int64)).to(self.device, non_blocking=True)

    def __enter__(self) -> None:
        global _source
        self._outer, _source = _source, self

    def __exit__(self, *error: object) -> None:
        global _source
        _source = self._outer


_source: Source | None = None


def rand(size: int, *shape: int) -> Tensor:
    """Return uniform numbers in [0, 1), float32 [B, *shape], on the run's device; `size` is B."""
    if (keys := _keys(size)) is None:
        return torch.rand(size, *shape, device=_device())
    count = math.prod(shape)
    return torch.cat(_pairs(keys, -(-count // 2)), dim=1)[:, :count].reshape(size, *shape)


def randn(size: int, *shape: int) -> Tensor:
    """Return normal numbers of mean 0 and variance 1, float32 [B, *shape], on the run's device. Source: Box & Muller 1958."""
    if (keys := _keys(size)) is None:
        return torch.randn(size, *shape, device=_device())
    count = math.prod(shape)
    first, second = _pairs(keys, -(-count // 2))
    radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * math.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count].reshape(size, *shape)


def randint(high: int, size: int, *shape: int) -> Tensor:
    """Return whole numbers in [0, high), at most 2**24, int64 [B, *shape], on the run's device."""
    return (rand(size, *shape) * high).long()


def rand_like(samples: Tensor) -> Tensor:
    """Return `rand` of the shape, type and device of a tensor [B, ...]."""
    return rand(*samples.shape).to(samples)


def randn_like(samples: Tensor) -> Tensor:
    """Return `randn` of the shape, type and device of a tensor [B, ...]."""
    return randn(*samples.shape).to(samples)


def bernoulli(probabilities: Tensor) -> Tensor:
    """Return 1 with the given probabilities, else 0, for a tensor [B, ...], of its type and device."""
    return (rand(*probabilities.shape).to(probabilities.device) < probabilities).to(probabilities.dtype)


def _keys(size: int) -> Tensor | None:
    return None if _source is None else _source.keys(size)


def _device() -> torch.device:
    return torch.device("cpu") if _source is None else _source.device


def _pairs(keys_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return two uniform numbers in [0, 1) for each of `count` draws of each key, float32 [B, count]."""
    bits = keys_B[:, None] + torch.arange(1, count + 1, device=keys_B.device) * _STEP  # int64 wraps, as unsigned numbers do
    bits ^= _right(bits, 30)
    bits *= _FIRST
    bits ^= _right(bits, 27)
    bits *= _SECOND
    bits ^= _right(bits, 31)
    return _right(bits, 40).float() * _UNIT, (_right(bits, 8) & _LOW).float() * _UNIT


def _right(bits: Tensor, places: int) -> Tensor:
    """Shift to the right as if the numbers were unsigned."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
