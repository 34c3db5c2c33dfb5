"""A batch is what torch's default makes of the same samples, whatever they are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_train.errors import ConfigError, DataError
from ddp_train.loader import collate as module
from ddp_train.loader.collate import collate


class Point(NamedTuple):
    x: Tensor
    y: int


NUMBERS = [
    int,
    float,
    bool,
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.float16,
    np.float32,
    np.float64,
]
SAMPLES: dict[str, list[Any]] = {
    **{kind.__name__: [kind(value) for value in (1, 0, 3)] for kind in NUMBERS},
    "complex numbers": [np.complex64(1), np.complex64(2j)],
    "tensors": [torch.rand(2, 3), torch.rand(2, 3)],
    "tensors of two types": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "parameters": [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))],
    **{f"arrays of {kind.__name__}": [np.arange(6).reshape(2, 3).astype(kind) for _ in range(2)] for kind in NUMBERS},
    "arrays without dimensions": [np.array(1.5), np.array(2.5)],
    "arrays of two types": [np.ones(2, np.float32), np.ones(2, np.float64)],
    "arrays that are views": [np.arange(12).reshape(3, 4)[:, 1], np.arange(12).reshape(3, 4)[:, 2]],
    "empty arrays": [np.zeros((0, 2)), np.zeros((0, 2))],
    "text": ["one", "two"],
    "bytes": [b"one", b"two"],
    "booleans and numbers": [True, 2],
    "whole and broken numbers": [1, 2.5],
    "broken and whole numbers": [2.5, 1],
    "numbers of two kinds": [1, np.int32(2)],
    "numbers and scalars": [1, torch.tensor(2)],
    "tuples": [(torch.ones(2), 1), (torch.zeros(2), 2)],
    "lists": [[torch.ones(2), 1], [torch.zeros(2), 2]],
    "lists of numbers": [[1, 2, 3], [4, 5, 6]],
    "empty tuples": [(), ()],
    "named tuples": [Point(torch.ones(2), 1), Point(torch.zeros(2), 2)],
    "dicts": [{"a": 1, "b": {"c": [np.ones(2), "x"]}}, {"a": 2, "b": {"c": [np.zeros(2), "y"]}, "more": 1}],
    "a tuple with dicts": [({"a": torch.ones(1)}, (1, 2.0)), ({"a": torch.zeros(1)}, (3, 4.0))],
    "one sample": [(torch.ones(2), 7)],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_batch_is_what_torch_makes_of_it(samples: list[Any]) -> None:
    assert plain(collate(samples, None)) == plain(default_collate(samples))


def plain(value: Any) -> Any:
    """Return what is nested in something, with the types of everything."""
    if isinstance(value, dict):
        return dict, {name: plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [plain(each) for each in value]
    return (type(value), value.dtype, value.is_contiguous(), value.tolist()) if isinstance(value, Tensor) else (type(value), value)


def test_mappings_of_other_kinds_become_dicts() -> None:
    assert type(collate([OrderedDict(a=1), OrderedDict(a=2)], None)) is dict


def test_a_batch_is_nobody_elses_memory() -> None:
    samples = [np.ones(3), np.ones(3)]
    first, second = collate(samples, None), collate(samples, None)
    first += 1
    assert second.tolist() == [[1.0] * 3] * 2
    assert samples[0].tolist() == [1.0] * 3


REFUSED: dict[str, tuple[list[Any], str]] = {
    "tensors": ([torch.ones(3), torch.ones(2)], r"one is float32 \[3\], another float32 \[2\]"),
    "arrays": ([np.ones(3), np.ones(2)], r"one is float64 \[3\], another float64 \[2\]"),
    "in a tuple": ([(torch.ones(3), 1), (torch.ones(2), 1)], r"one is \(float32 \[3\], a int\), another \(float32 \[2\], a int\)"),
    "lengths": ([[1, 2], [1]], r"one is \(a int, a int\), another \(a int\)"),
    "a key": ([{"a": 1, "b": 2}, {"a": 1}], r"one is \{a: a int, b: a int\}, another \{a: a int\}"),
    "types": ([1, "one"], "one is a int, another a str"),
    "none": ([1.0, None], "one is a float, another None"),
}


@pytest.mark.parametrize(("samples", "said"), REFUSED.values(), ids=REFUSED)
def test_samples_that_do_not_go_together_are_told_apart(samples: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"loader.collate: samples of a batch cannot be stacked: {said}\n"):
        collate(samples, None)


def test_what_cannot_be_stacked_at_all_is_said_by_torch() -> None:
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        collate([None, None], None)
    with pytest.raises(RuntimeError, match="sparse tensors are not currently supported"):
        collate([torch.ones(2).to_sparse()], None)
    with pytest.raises(ValueError, match="Overflow"):
        collate([1, 2**63], None)


def test_what_somebody_has_told_torch_to_collate_is_collated_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Words(str):
        pass

    monkeypatch.setitem(default_collate_fn_map, Words, lambda batch, *, collate_fn_map: torch.tensor([len(text) for text in batch]))
    monkeypatch.setitem(default_collate_fn_map, int, lambda batch, *, collate_fn_map: sum(batch))
    lengths, numbers = collate([(Words("one"), 1), (Words("three"), 2)], None)
    assert lengths.tolist() == [3, 5]
    assert numbers == 3


def test_fields_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match=r"loader.fields: a sample has image, label\n.*a dict with image, target"):
        collate([{"image": 1, "label": 2}], ["image", "target"])
    with pytest.raises(ConfigError, match=r"loader.fields: a sample is a int"):
        collate([1], ["image"])
    images, _ = collate([{"label": 1, "image": torch.ones(2)}] * 3, ["image", "label"])
    assert images.shape == (3, 2)


def test_usual_samples_do_not_need_torchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what the quicker ways are for."""

    def never(samples: Any) -> None:
        pytest.fail(f"asked for {samples}")

    never.__module__ = default_collate.__module__
    monkeypatch.setattr(module, "default_collate", never)
    collate([(torch.ones(2), 1, 1.0, np.float32(1), np.ones(2), {"a": [True]})] * 2, None)
