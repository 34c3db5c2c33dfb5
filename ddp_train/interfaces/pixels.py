"""Images on their way to a device, as bytes: normalised and mixed where they arrive.

Shapes: B samples in a batch, C channels, H height, W width, K classes.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_train.interfaces.batch import Batch


class Mix(NamedTuple):
    """Each image's partner, and how much of which is taken (`loader.mixup_alpha`, `loader.cutmix_alpha`)."""

    others: Tensor  # [B, C, H, W]
    shares: Tensor  # float32 [B]: how much of each pixel is the sample's own
    boxes: Tensor | None = None  # int64 [B, 4]: from which row to which, from which column to which the partner is instead; None: nowhere
    is_cut: Tensor | None = None  # bool [B]: by its box, and not by its share


class Pixels(NamedTuple):
    """A batch of images that are not normalised yet: `image * scale + offset`, in float32, is what the model gets."""

    images: Tensor  # uint8 [B, C, H, W]
    labels: Tensor | None  # [B], or class shares [B, K]; None: a batch is the images alone
    scale: tuple[float, ...]  # one for each channel
    offset: tuple[float, ...]
    mix: Mix | None = None


def finished(batch: Batch) -> Batch:
    """Return a batch as a model gets it, on the device where it is: images normalised, and mixed. Any other batch is what it was."""
    if not isinstance(batch, Pixels):
        return batch
    images = _normalised(batch.images, batch)
    if batch.mix is not None:
        images = torch.lerp(_normalised(batch.mix.others, batch), images, pixel_shares(batch.mix, images))
    return images if batch.labels is None else (images, batch.labels)


def as_pair(batch: Batch) -> Batch:
    """Return a batch of the same form and shapes as it will be finished, without the work."""
    if not isinstance(batch, Pixels):
        return batch
    return batch.images if batch.labels is None else (batch.images, batch.labels)


def pixel_shares(mix: Mix, images: Tensor) -> Tensor:
    """Return how much of each place is the sample's own, as float32 that spreads over `images`."""
    shares = mix.shares.view(-1, *[1] * (images.ndim - 1))
    if mix.boxes is None or mix.is_cut is None:
        return shares
    top, bottom, left, right = (side[:, None] for side in mix.boxes.unbind(1))
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[2:])
    is_inside = ((rows >= top) & (rows < bottom))[:, None, :, None] & ((columns >= left) & (columns < right))[:, None, None, :]
    return torch.where(mix.is_cut.view(-1, 1, 1, 1), (~is_inside).float(), shares)


def _normalised(images: Tensor, batch: Pixels) -> Tensor:
    scale, offset = (_per_channel(tuple(values), images.device) for values in (batch.scale, batch.offset))
    return images.to(torch.float32).mul_(scale).add_(offset)


@lru_cache(maxsize=64)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one value for each channel, kept on the device: copied there for each batch it would hold up the host."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
