"""Which sample comes at which position of an epoch: shuffled, by weight, balanced over classes; and gathered by length.

Every sampler is a pure function of (seed, epoch, position) and the data set, computed for any positions at once: nothing is drawn in
sequence, so seeking costs nothing. What a sampler holds per sample is in tensors: loader workers get those through shared memory, once for
all workers of a rank, where arrays would be copied into each.
Shapes: N samples in the data set, C classes that have samples, n positions.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import GOLDEN, Permutation, mix, permute_each
from ddp_train.interfaces import DataSource, Indices, Sampler
from ddp_train.loader.dataset_adapter import dataset_of, label_of
from ddp_train.loader.global_generators import seeded

_WEIGHTED, _CLASSES, _MEMBERS, _BATCHES, _ITERATED = 1, 2, 3, 4, 5  # what a key is for; the shuffle's own has no such number


class Shuffled:
    """Every sample once in an epoch, in an order of its own for each epoch; nothing is held in memory."""

    repeats, window = False, 1

    def __init__(self, length: int, *, seed: int) -> None:
        self.length, self.seed = length, seed
        self._permutation: tuple[int, Permutation] | None = None

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, Permutation(self.length, key_of(self.seed, epoch))
        return self._permutation[1](positions)


class Weighted:
    """N independent draws an epoch, with replacement: a sample's chance is its share of the weights. 8 bytes per sample.

    By inversion: a keyed hash of the position is a point on the line of all weights laid end to end, found by bisection. Half of an
    alias table's memory, built in one vectorised pass, and a weight of zero is never drawn.

    `weights`: float64 [N], finite, none negative, one of them positive.
    """

    repeats, window = True, 1

    def __init__(self, weights: NDArray[np.float64], *, seed: int) -> None:
        self.length, self.seed = len(weights), seed
        # The largest becomes 1: the sum can neither overflow nor be so small that a point is rounded up to it.
        self._ends = torch.from_numpy(np.cumsum(weights / weights.max()))

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        ends = self._ends.numpy()
        uniform = (hashes_of(positions, key_of(self.seed, epoch, _WEIGHTED)) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        points = uniform * ends[-1]
        ascending = np.argsort(points)  # bisection in that order finds its way in the cache
        indices = np.empty(len(positions), np.int64)
        indices[ascending] = np.searchsorted(ends, points[ascending], side="right")
        return indices


class Balanced:
    """Every class equally often: each C consecutive positions, counted from the run's start, have each class once, in a keyed order.

    A class's visits go through its samples in a keyed order, then through them again in another one, across epochs: at any time the
    samples of one class differ by one visit at most. An epoch is as many whole rounds of the classes as N has. 8 bytes per sample.

    Args:
        labels: integers [N]; numbers without a sample are no class.
        multiple_of: the epoch's length is one, rounded down: where the last batch is left out, no visit is lost with it.
    """

    repeats, window = True, 1

    def __init__(self, labels: NDArray[np.integer[Any]], *, seed: int, multiple_of: int = 1) -> None:
        self.seed = seed
        _, counts = np.unique(labels, return_counts=True)
        whole_rounds = len(labels) - len(labels) % len(counts)
        self.length = whole_rounds - whole_rounds % multiple_of
        self._counts = counts.astype(np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._members = torch.from_numpy(np.argsort(labels, kind="stable"))  # class after class

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        rounds, places = np.divmod(positions + epoch * self.length, len(self._counts))
        order_keys = hashes_of(rounds, key_of(self.seed, 0, _CLASSES))
        classes = permute_each(places, np.full_like(places, len(self._counts)), order_keys)
        counts = self._counts[classes]
        passes, visits = np.divmod(rounds, counts)  # one visit each round
        member_keys = hashes_of(passes, hashes_of(classes, key_of(self.seed, 0, _MEMBERS)))
        indices: Indices = self._members.numpy()[self._starts[classes] + permute_each(visits, counts, member_keys)]
        return indices


class Bucketed:
    """Another sampler's samples, rearranged so that those of a global batch have similar lengths.

    Within each window of `batches` global batches: sorted by length (equal ones keep their order), cut into batches, and the batches
    put in a keyed order. What is drawn in a window, and so in an epoch, stays the same. The last, smaller batch of an epoch stays as it
    is: sorted with the others it would have the longest samples every time. 8 bytes per sample at most.

    Args:
        lengths: a number for each sample of the data set, [N].
        batches: global batches in a window.
    """

    def __init__(self, sampler: Sampler, lengths: NDArray[Any], *, global_batch_size: int, batches: int) -> None:
        self.length, self.seed, self.repeats = sampler.length, sampler.seed, sampler.repeats
        self._sampler, self._batch_size = sampler, global_batch_size
        self._lengths = torch.from_numpy(np.require(lengths, requirements=["C", "W"]))
        self._full_batches = sampler.length // global_batch_size
        self._batches = max(1, min(batches, self._full_batches))
        self.window = self._batches * global_batch_size

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        short = self._full_batches % self._batches  # batches in the last window
        full = self._full_batches * self._batch_size
        border = full - short * self._batch_size
        indices = np.empty(len(positions), np.int64)
        for start, stop, batches in ((0, border, self._batches), (border, full, short)):
            inside = np.flatnonzero((positions >= start) & (positions < stop))
            if inside.size:
                windows, places = np.divmod(positions[inside] - start, batches * self._batch_size)
                needed, rows = np.unique(windows, return_inverse=True)
                starts = start + needed * batches * self._batch_size
                indices[inside] = self._arranged(epoch, starts, batches)[rows, places]
        after = np.flatnonzero(positions >= full)
        indices[after] = self._sampler(epoch, positions[after])
        return indices

    def _arranged(self, epoch: int, starts: Indices, batches: int) -> Indices:
        shape = len(starts), batches, self._batch_size
        positions = starts[:, None] + np.arange(batches * self._batch_size)
        drawn = self._sampler(epoch, positions.reshape(-1)).reshape(positions.shape)
        by_length = np.argsort(self._lengths.numpy()[drawn], axis=1, kind="stable")
        in_batches = np.take_along_axis(drawn, by_length, axis=1).reshape(shape)
        numbers = positions[:, :: self._batch_size] // self._batch_size
        batch_order = np.argsort(hashes_of(numbers, key_of(self.seed, epoch, _BATCHES)), axis=1)
        return np.take_along_axis(in_batches, batch_order[:, :, None], axis=1).reshape(positions.shape)


class Iterated:
    """The indices that a sampler of others gives (`torch.utils.data.Sampler`), an epoch at a time. 8 bytes per index.

    It begins each epoch with the global generators seeded for it, and is told of the epoch where it has `set_epoch`.

    Args:
        sampler: gives indices when it is iterated over, equally many in each epoch.
        num_samples: of the data set.
    """

    repeats, window = True, 1

    def __init__(self, sampler: Any, *, num_samples: int, seed: int) -> None:
        self.seed, self._sampler, self._num_samples = seed, sampler, num_samples
        self._epoch, self._indices = 0, self._drawn(0)
        self.length = len(self._indices)
        if not np.array_equal(self._indices, self._drawn(0)):
            raise self._refused("gives a different order the second time", "one that draws from the global generators, or from none")

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        if self._epoch != epoch:
            self._epoch, self._indices = epoch, self._drawn(epoch)
            if len(self._indices) != self.length:
                happened = f"gives {len(self._indices)} indices in epoch {epoch}, and {self.length} in the first"
                raise self._refused(happened, "the same number in every epoch")
        indices: Indices = self._indices[positions]
        return indices

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": -1, "_indices": None}  # for data-loader workers: each draws for itself

    def _drawn(self, epoch: int) -> Indices:
        with seeded(key_of(self.seed, epoch, _ITERATED)):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            try:
                indices = np.fromiter(self._sampler, np.int64)
            except (TypeError, ValueError) as error:
                raise self._refused(f"gives no indices: {error}", "an index for each sample, not batches of them") from error
        if not len(indices) or indices.min() < 0 or indices.max() >= self._num_samples:
            span = f"{indices.min()} to {indices.max()}" if len(indices) else "none"
            raise self._refused(f"gives the indices {span}", f"0 to {self._num_samples - 1}, one at least")
        return indices

    def _refused(self, happened: str, expected: str) -> ConfigError:
        return ConfigError(key="loader.sampler", happened=f"{type(self._sampler).__name__} {happened}", expected=expected)


def sampler_from(
    source: DataSource,
    custom: Any = None,
    *,
    seed: int,
    sampling: str,
    sample_weights: str | None,
    multiple_of: int,
    global_batch_size: int,
    bucket_batches: int | None,
) -> Sampler:
    """Return the sampler that the config's loader keys ask for.

    Args:
        custom: from `loader.sampler`: a `Sampler` (interfaces/data.py), or one of torch's.
        multiple_of: divides the length of a balanced epoch: the global batch, with `loader.drop_last`.

    Raises ConfigError: the data set has no labels or lengths.
    Raises DataError: weights, labels or lengths do not fit the data set.
    """
    sampler: Sampler
    if custom is not None:
        sampler = custom if callable(custom) and hasattr(custom, "length") else Iterated(custom, num_samples=len(source), seed=seed)
    else:
        weights = read_weights(sample_weights, len(source)) if sample_weights is not None else None
        sampler = plain_sampler(source, seed=seed, sampling=sampling, weights=weights, multiple_of=multiple_of)
    if sampler.length == 0:
        happened = f"is {global_batch_size}, more than a balanced epoch of the {len(source)} samples has, and loader.drop_last=true"
        expected = "at least one whole batch in an epoch"
        raise ConfigError(key="trainer.global_batch_size", happened=happened, expected=expected, fix="loader.drop_last=false")
    if bucket_batches is None:
        return sampler
    return Bucketed(sampler, _lengths(source), global_batch_size=min(global_batch_size, sampler.length), batches=bucket_batches)


def plain_sampler(source: DataSource, *, seed: int, sampling: str, weights: NDArray[np.float64] | None, multiple_of: int = 1) -> Sampler:
    """Return the sampler that `loader.sampling` asks for, of one source; with `weighted` by the weights of its samples."""
    if sampling == "balanced":
        return Balanced(labels_of(source), seed=seed, multiple_of=multiple_of)
    return Shuffled(len(source), seed=seed) if weights is None else Weighted(weights, seed=seed)


def read_weights(path: str, num_samples: int) -> NDArray[np.float64]:
    def refused(happened: str, expected: str) -> DataError:
        return DataError(key="loader.sample_weights", happened=f"{path} {happened}", expected=expected, fix="np.save(FILE, weights)")

    try:
        weights = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise refused(f"cannot be read: {error}", "a NumPy file, .npy") from error
    if not isinstance(weights, np.ndarray) or weights.shape != (num_samples,) or weights.dtype.kind not in "iufb":
        content = f"{weights.dtype} {weights.shape}" if isinstance(weights, np.ndarray) else "several arrays"
        raise refused(f"has {content}", f"numbers ({num_samples},): one for each sample of the training split")
    weights = weights.astype(np.float64)
    bad = np.flatnonzero(~(weights >= 0) | np.isinf(weights))
    if bad.size:
        raise refused(f"has weight {weights[bad[0]]} for sample {bad[0]} ({bad.size} such weights)", "finite numbers, 0 or more")
    if not weights.any():
        raise refused("has only zeros", "a positive weight for at least one sample")
    return weights


def labels_of(source: DataSource) -> NDArray[np.integer[Any]]:
    """Return the class of each sample: what the data set has as `labels`, as `targets` (torchvision), or as its label (Hugging Face)."""
    offered = dataset_of(source)
    labels = getattr(offered, "targets", None) if source.labels is None else source.labels
    if labels is None and (label := label_of(offered)):
        labels = offered[label][:]
    if labels is None:
        happened = f"is balanced, but {type(offered).__name__} does not provide the classes of its samples"
        expected = "a data set with `labels` or `targets`, one whole number per sample"
        fix = "loader.sampling=shuffled, or weighted with a file of weights"
        raise ConfigError(key="loader.sampling", happened=happened, expected=expected, fix=fix)
    return _checked(labels, f"{type(offered).__name__}.labels", (len(source),), "iu", "whole numbers")


def _lengths(source: DataSource) -> NDArray[Any]:
    name = type(dataset_of(source)).__name__
    if (lengths := source.lengths) is None:
        happened = f"is given, but {name} does not provide the lengths of its samples"
        expected = "a data set with `lengths`, one number per sample"
        raise ConfigError(key="loader.bucket_batches", happened=happened, expected=expected, fix="loader.bucket_batches=null")
    return _checked(lengths, f"{name}.lengths", (len(source),), "iuf", "numbers")


def _checked(offered: Any, name: str, shape: tuple[int], kinds: str, expected: str) -> NDArray[Any]:
    values = np.asarray(offered)
    if values.shape != shape or values.dtype.kind not in kinds:
        raise DataError(key="data", happened=f"{name} is {values.dtype} {values.shape}", expected=f"{expected} {shape}")
    return values


def key_of(seed: int, epoch: int, *purpose: int) -> int:
    return int(np.random.SeedSequence([seed, epoch, *purpose]).generate_state(1, np.uint64)[0])


def hashes_of(values: Indices, key: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each value, another function for each key."""
    return mix(mix(values.astype(np.uint64) + GOLDEN) ^ np.asarray(key, np.uint64))
