"""Makes a batch of samples: as torch's DataLoader does by default, in less time.

torch's `default_collate` is asked for whatever is not listed here, so that a batch is the same, and types that somebody has added to
`default_collate_fn_map` are taken. Quicker here is a field of numbers or of arrays: numpy makes one array of it, where torch looks at every
number, or makes a tensor of each array. Each batch is a new tensor: whoever was given the one before may still hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_train.errors import ConfigError, DataError
from ddp_train.interfaces import Batch, describe

Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples, as the DataLoader's `collate_fn`."""

_NUMBERS: dict[type, np.dtype[Any]] = {
    kind: np.dtype(kind)
    for kind in (bool, int, float, np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64)
}
"""Types of numbers, and what a tensor of them has."""
_DTYPES = frozenset(_NUMBERS.values())


def collate(samples: list[Any], fields: Sequence[str] | None, by: Collate | None = None) -> Batch:
    """Make a batch of samples.

    Args:
        fields: for samples that are dicts: the keys that make the batch, in this order. None: all of the sample.
        by: what makes it; None: stacked as torch's DataLoader does by default.

    Raises:
        ConfigError: a sample does not have them.
        DataError: the samples differ in shape or type.
    """
    for sample in samples if fields is not None else ():
        if not isinstance(sample, Mapping) or not all(name in sample for name in fields or ()):
            what = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is a {type(sample).__name__}"
            raise ConfigError(key="loader.fields", happened=f"a sample {what}", expected=f"a dict with {', '.join(fields or ())}")
    chosen = samples if fields is None else [tuple(sample[name] for name in fields) for sample in samples]
    made = by(chosen) if by else _together(chosen)
    return dict(made) if isinstance(made, Mapping) else made  # others have mappings of their own, as transformers' BatchEncoding


def _together(samples: list[Any]) -> Batch:
    try:
        return _stacked(samples) if _is_as_torch_made_it() else default_collate(samples)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        first = describe(samples[0])
        other = next((text for text in map(describe, samples) if text != first), None)
        if other is None:  # then each of them cannot be stacked alone either: whoever reads them says which
            raise
        raise DataError(
            key="loader.collate",
            happened=f"samples of a batch cannot be stacked: one is {first}, another {other}",
            expected="the same shapes and types in every sample",
            fix="+loader.collate._target_=my_package.my_function: what makes a batch of such samples, as by padding them",
        ) from error


def _is_as_torch_made_it() -> bool:
    """Tell whether nobody has told torch to collate something in another way."""
    return all(collates.__module__ == default_collate.__module__ for collates in default_collate_fn_map.values())


def _stacked(samples: Any) -> Any:
    """Return what `default_collate` returns. The first sample decides what a field is, as it does there."""
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor and first.layout is torch.strided and not first.is_nested:
        return torch.stack(samples)
    if kind is dict:
        return {name: _stacked([sample[name] for sample in samples]) for name in first}
    if (kind is tuple or kind is list) and set(map(len, samples)) == {len(first)}:
        return [_stacked(field) for field in zip(*samples, strict=True)]  # a list of tuples' fields, too
    quick = _one_array(samples, first, kind) if kind in _NUMBERS or kind is np.ndarray else None
    return default_collate(samples) if quick is None else torch.from_numpy(quick)


def _one_array(samples: Sequence[Any], first: Any, kind: type) -> NDArray[Any] | None:
    """Return the array of numbers or of arrays that are all of one type and shape; None: they are not, or torch has no such type."""
    if set(map(type, samples)) != {kind}:
        return None
    if kind is np.ndarray and (first.dtype not in _DTYPES or {array.dtype for array in samples} != {first.dtype}):
        return None
    try:
        return np.array(samples, _NUMBERS.get(kind))
    except (OverflowError, ValueError):  # torch says it in its own words
        return None
