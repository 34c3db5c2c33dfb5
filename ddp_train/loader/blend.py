"""Mixup and CutMix: each training sample together with another one of its epoch, and targets that are shares of both classes.

Everything is decided by the sample's key, as augmentation is, and the other sample by the order (`SampleOrder.partners`): so a sample looks
the same on any number of ranks, micro-batches and workers, and after a resume.
Shapes: B samples, C channels, H height, W width, K classes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.errors import DataError
from ddp_train.hashing import Keys, random_bits
from ddp_train.interfaces.batch import Batch, Mix, Pixels, as_pair, describe, pixel_shares

_KIND, _SHARE, _TOP, _LEFT = range(1 << 20, (1 << 20) + 4)  # which independent draw of a key decides what; augmentation has the small ones
_GRID = 4097  # points of a distribution


class Blend:
    """Blends batches of (inputs, labels): float inputs, int64 labels [B].

    Args:
        num_classes: K.
        mixup_alpha: of the share's distribution Beta(alpha, alpha), where a sample is mixed pixel by pixel; None: none is.
        cutmix_alpha: the same, where a box of one is cut into the other; None: none is. With both, each happens to half of the samples.

    Source: Zhang et al. 2018, arXiv:1710.09412 (mixup); Yun et al. 2019, arXiv:1905.04899 (CutMix).
    """

    def __init__(self, *, num_classes: int, mixup_alpha: float | None, cutmix_alpha: float | None) -> None:
        self._num_classes, self._alphas = num_classes, (mixup_alpha, cutmix_alpha)

    def __call__(self, batch: Batch, others: Batch, keys: Keys) -> Batch:
        """Return blended inputs and shares of the classes [B, K]; for `Pixels` with `mix`, by which the device blends them.

        `others` has the partner of each sample, in a batch of the same shapes.
        """
        (inputs, labels), (other_inputs, other_labels) = self._pair(batch), self._pair(others)
        shares, mix = self._drawn(keys, inputs, other_inputs)
        targets = torch.lerp(self._one_hot(other_labels), self._one_hot(labels), shares[:, None])
        if isinstance(batch, Pixels):
            return batch._replace(labels=targets, mix=mix)
        return torch.lerp(other_inputs, inputs, pixel_shares(mix, inputs).to(inputs.dtype)), targets

    def _drawn(self, keys: Keys, inputs: Tensor, others: Tensor) -> tuple[Tensor, Mix]:
        """Return the weight of a sample itself in its target, [B], and in each part of its inputs."""
        mixup_alpha, cutmix_alpha = self._alphas
        uniform = _uniform(keys, _SHARE)
        if cutmix_alpha is None:
            assert mixup_alpha is not None
            mixed_shares = _on(inputs, beta(uniform, mixup_alpha))
            return mixed_shares, Mix(others, mixed_shares)
        if inputs.ndim != 4:
            raise _refused("loader.cutmix_alpha", describe(inputs), "images [B, C, H, W]")
        is_cut = _uniform(keys, _KIND) < 0.5 if mixup_alpha is not None else np.ones(len(keys), bool)
        mixed = beta(uniform, mixup_alpha) if mixup_alpha is not None else uniform
        height, width = inputs.shape[2:]
        boxes = _boxes(keys, beta(uniform, cutmix_alpha), height, width)
        outside = height * width - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        shares = np.where(is_cut, outside / (height * width), mixed)
        places, kinds = (torch.from_numpy(array).to(inputs.device, non_blocking=True) for array in (boxes, is_cut))
        return _on(inputs, shares), Mix(others, _on(inputs, mixed), places, kinds)

    def _pair(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pair = as_pair(batch)
        inputs, labels = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
        if isinstance(inputs, Tensor) and isinstance(labels, Tensor) and labels.shape == inputs.shape[:1]:
            types = inputs.is_floating_point(), labels.is_floating_point()
            if types == (True, False) or isinstance(batch, Pixels):
                return inputs, labels
        expected = "float inputs [B, ...] and whole numbers [B], their classes"
        raise _refused("loader.mixup_alpha, loader.cutmix_alpha", describe(batch), expected)

    def _one_hot(self, labels: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(labels, self._num_classes).float()


def beta(uniform: NDArray[Any], alpha: float) -> NDArray[Any]:
    """Return the quantiles of Beta(alpha, alpha) at `uniform`, by its integral on a grid, to about 1e-4."""
    # One half, for the other is its mirror image. Below 1 the density has a pole at 0, which goes with the variable x^alpha.
    power = min(alpha, 1.0)
    grid = np.linspace(0.0, 0.5**power, _GRID)
    points = grid ** (1 / power)
    density = (1 - points) ** (alpha - 1) * (points ** (alpha - 1) if alpha > 1 else 1.0)
    integral = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    low = np.interp(2 * np.minimum(uniform, 1 - uniform), integral / integral[-1], grid) ** (1 / power)
    quantiles: NDArray[Any] = np.where(uniform < 0.5, low, 1 - low)
    return quantiles


def _boxes(keys: Keys, shares: NDArray[Any], height: int, width: int) -> NDArray[np.int64]:
    """Return the rows and columns where each image is another one, [B, 4]: a box of the area `1 - share`, cut off at the image's sides."""
    side, bounds = np.sqrt(1 - shares), []
    for draw, size in ((_TOP, height), (_LEFT, width)):
        middle, half = np.floor(_uniform(keys, draw) * size), np.floor(side * size) / 2
        bounds += [np.clip(np.floor(edge), 0, size) for edge in (middle - half, middle + half)]
    return np.stack(bounds, axis=1).astype(np.int64)


def _on(inputs: Tensor, numbers: NDArray[Any]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32)).to(inputs.device, non_blocking=True)


def _uniform(keys: Keys, draw: int) -> NDArray[Any]:
    return (random_bits(keys, draw) >> np.uint64(11)) * 2.0**-53  # in [0, 1)


def _refused(key: str, happened: str, expected: str) -> DataError:
    return DataError(key=key, happened=f"is given, and a batch is {happened}", expected=expected, fix=f"{key.partition(',')[0]}=null")
