"""What data must offer: samples by position, and their order.

A `Dataset` of torch and an `IterableDataset` (loader/dataset_adapter.py) are adapted to what is here.
Shapes: N samples in all, B samples in a batch, C channels, H height, W width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.errors import conflict
from ddp_train.hashing import Keys
from ddp_train.interfaces.batch import Batch
from ddp_train.traits import DataConstants, member_of

Indices = NDArray[np.int64]
"""Positions in a data source, shape [B]."""


class DataSource(DataConstants, ABC):
    """Samples that are read by position, a batch at a time. A class without this base is taken, too, if it has what is abstract here."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Facts of the data: `image_shape` (C, H, W), `num_classes`, `classes` (their names), `vocab_size`, `context_length`,
        `bytes_per_token`, `ignore_index` (the target that counts nowhere).

        An argument of the model or the objective that is `auto` in the config takes the fact of the same name.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return N."""

    @abstractmethod
    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices`, in that order, stacked along a leading dimension B."""

    @property
    def augments(self) -> bool:
        """Whether `augment` changes anything; False spares computing the keys."""
        return getattr(self.augment, "__func__", None) is not DataSource.augment

    def augment(self, batch: Batch, keys: Keys, indices: Indices) -> Batch:
        """Return the training samples at `indices` with sample i changed at random as `keys[i]` says: 64 uniform random bits, shape [B].

        A key depends on (seed, epoch, sample index) alone, so a sample looks the same whatever the number of ranks, workers or restarts.
        (On its position too with `loader.sampling=weighted` or `balanced`, where a sample may come twice in an epoch.)
        """
        return batch

    def seed_reads(self, keys_of: Callable[[Indices], Keys]) -> None:
        """Seed each random draw of `batch` by the key of its sample from now on. Called before each training batch; by default for nothing.

        A source around another one passes this on, with a function of the indices that the other one has.
        """

    def where(self, index: int) -> str:
        """Return the file of one sample, or the file and the place in it, for messages; "": not known."""
        return ""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """Sizes, names, and hashes of the first and last samples: a resumed run compares them.

        Plain values that need no reading of all samples. No times: a copy has others. By default the length alone is compared.
        """
        return {}

    @property
    def meaning(self) -> Mapping[str, Any]:
        """The meaning of the numbers: vocabulary, tokenizer, mean and std; plain values by name. By default the names in `classes`."""
        classes = member_of(self, "classes")
        return {"classes": list(classes)} if isinstance(classes, (list, tuple)) and classes else {}

    def use_meaning(self, meaning: Mapping[str, Any]) -> None:
        """Give samples the numbers that they have in a run's data from now on, or raise a DataError. Called before the first batch."""

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The classes of the N samples, shape [N], any integers, as `loader.sampling=balanced` needs them; None: not known."""
        return None

    @property
    def lengths(self) -> NDArray[Any] | None:
        """The lengths of the N samples, shape [N], in any unit, as `loader.bucket_batches` needs them; None: not known."""
        return None

    def to(self, device: torch.device) -> None:
        """Keep the data on `device`; batches are made there from now on (`loader.on_device`)."""
        happened = f"a {type(getattr(self, 'dataset', self)).__name__} cannot live on the device"  # what an adapter adapts
        raise conflict("loader.on_device", happened, "false", expected="a data source with to(device)")

    def give_pixels(self) -> None:
        """Let batches of images be `Pixels` from now on, where they can: bytes, which a GPU normalises. Called before the first batch."""


class Sampler(Protocol):
    """Which sample comes at which position of an epoch: a pure function of (seed, epoch, position), asked for any positions at once."""

    seed: int
    length: int
    """Positions in an epoch."""
    repeats: bool
    """Whether a sample can come more than once in an epoch."""
    window: int
    """How many consecutive positions are computed together; a window begins at a multiple of this. 1: each position by itself."""

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        """Return the indices of the samples at `positions`, shape [n] -> [n]."""
