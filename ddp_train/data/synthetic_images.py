"""Images computed from their index: data for a first run, a test or a benchmark, with no file and no download.

A class is an orientation and a wavelength of a striped patch. Place, phase, tilt, contrast and colour are random and there is noise,
so that no single pixel tells the class: a linear model stays under 20%, a small convolutional network passes 95% on held-out images.
Shapes: B samples, C channels, H height, W width.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.hashing import Keys, random_bits
from ddp_train.interfaces import DataSource, Indices

_SPLITS = ("train", "eval")
_WAVELENGTHS = (3.2, 5.2)  # pixels; the classes take turns
_VARIANTS = 64  # precomputed tilts and wavelengths around each class's own
_TURN = 1024  # phases are integers, 1024 to the turn (a power of two, see &): exact sums, the same in every batch and on every machine
_COSINE = np.cos(2 * np.pi * np.arange(_TURN) / _TURN).astype(np.float32)


class SyntheticImages(DataSource):
    """Striped patches in noise: `num_samples` images, each a pure function of (seed, split, index).

    Images are float32 [B, C, H, W] of about zero mean and unit variance; label = index mod `num_classes`, so classes are balanced.

    Args:
        num_samples: any number; nothing is stored.
        split: "train" or "eval", which share no image.
        image_size: height and width in pixels.
        noise: standard deviation of each pixel's noise; the stripes' amplitude is 0.5 to 1.
    """

    gives_pairs = True
    argument_ranges: ClassVar = {
        "num_samples": {"min": 1},
        "image_size": {"min": 1},
        "channels": {"min": 1},
        "num_classes": {"min": 1},
        "noise": {"min": 0},
    }

    def __init__(
        self,
        num_samples: int,
        split: Literal["train", "eval"] = "train",
        *,
        image_size: int = 16,
        channels: int = 3,
        num_classes: int = 10,
        noise: float = 0.5,
        seed: int = 0,
    ) -> None:
        self._num_samples, self._image_size, self._channels, self._num_classes = num_samples, image_size, channels, num_classes
        self._noise = noise
        # The split is the counter's highest bit, and all that follows is a bijection: the splits cannot share a key.
        seed_bits = random_bits(np.asarray([seed % 2**64], np.uint64), 0)
        self._key_mask = seed_bits ^ np.uint64(_SPLITS.index(split) << 63)
        self._steps = _phase_steps(num_classes)
        distance = np.arange(2 * image_size) / image_size  # from the patch's centre, in image widths
        self._window = np.exp(-0.5 * (distance / 0.3) ** 2).astype(np.float32)

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"image_shape": (self._channels, self._image_size, self._image_size), "num_classes": self._num_classes}

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return {"key": self._key_mask.tobytes().hex(), "noise": self._noise}

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.arange(self._num_samples) % self._num_classes

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [B, C, H, W] float32 and labels [B] int64."""
        indices = np.asarray(indices, np.int64)
        labels_B = indices % self._num_classes
        keys_B = random_bits(indices.astype(np.uint64) ^ self._key_mask, 0)
        # The first draws of a key place and colour the stripes, the later ones are the noise.
        bits = random_bits(keys_B[:, None], np.arange(4 + self._channels, dtype=np.uint64))
        uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)  # in [0, 1), exact in 24 bits
        stripes = self._stripes(labels_B, uniform[:, :4])
        centred = uniform[:, 4:] - np.float32(0.5)
        gains = centred + np.copysign(np.float32(0.5), centred)  # contrast of each channel: -1 to -0.5, or 0.5 to 1
        images_BCHW = self._noise_images(keys_B)
        images_BCHW += stripes[:, None] * gains[:, :, None, None]
        images_BCHW *= np.float32((0.1 + self._noise**2) ** -0.5)  # 0.1: the stripes' own variance
        return torch.from_numpy(images_BCHW), torch.from_numpy(labels_B)

    def _stripes(self, labels_B: NDArray[np.int64], uniform: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return stripes under a Gaussian window, [B, H, W] in [-1, 1]."""
        size = self._image_size
        whole = (uniform * np.asarray([_VARIANTS, _TURN, size, size], np.float32)).astype(np.int64)
        variant_B, phase_B, centre_y_B, centre_x_B = whole.T
        steps = self._steps[labels_B, variant_B]
        pixels = np.arange(size)
        rows = steps[:, :1] * pixels + phase_B[:, None]
        columns = steps[:, 1:] * pixels
        stripes: NDArray[np.float32] = _COSINE[(rows[:, :, None] + columns[:, None, :]) & (_TURN - 1)]
        # Centres keep to the middle half, so that enough of the patch is seen.
        stripes *= self._window[np.abs(pixels - (size // 4 + centre_y_B // 2)[:, None])][:, :, None]
        stripes *= self._window[np.abs(pixels - (size // 4 + centre_x_B // 2)[:, None])][:, None, :]
        return stripes

    def _noise_images(self, keys_B: Keys) -> NDArray[np.float32]:
        """Return uniform noise, [B, C, H, W], of standard deviation `noise`: eight pixels from each 64 bits."""
        shape = (len(keys_B), self._channels, self._image_size, self._image_size)
        pixels = shape[1] * shape[2] * shape[3]
        draws = np.arange(-(-pixels // 8), dtype=np.uint64) + np.uint64(4 + self._channels)
        noise_bytes = random_bits(keys_B[:, None], draws).view(np.uint8)[:, :pixels]
        images = noise_bytes * np.float32(self._noise * 12**0.5 / 255)
        images -= np.float32(self._noise * 12**0.5 / 2)
        return images.reshape(shape)


def _phase_steps(num_classes: int) -> NDArray[np.int64]:
    """Return the phase that a class's variant gains per pixel down and per pixel right, [K, V, 2]."""
    classes = np.arange(num_classes)[:, None]
    spread = (np.arange(_VARIANTS) + 0.5) / _VARIANTS - 0.5
    num_orientations = -(-num_classes // 2)
    turns = (classes // 2 + 0.5 * spread) / num_orientations  # tilts leave half of the way to the next orientation free
    # Wavelengths vary by 10% each way; 19 is coprime to 64, so that they do not follow the tilt.
    frequency = (1 + 0.2 * np.roll(spread[np.arange(_VARIANTS) * 19 % _VARIANTS], 7)) / np.asarray(_WAVELENGTHS)[classes % 2]
    steps = np.stack([np.sin(np.pi * turns), np.cos(np.pi * turns)], axis=-1) * frequency[..., None] * _TURN
    whole: NDArray[np.int64] = np.rint(steps).astype(np.int64)
    return whole
