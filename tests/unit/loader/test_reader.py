"""A sample that cannot be read: named, or another one in its place."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.errors import DataError
from tests.unit.loader.numbers import Damaged, Numbers, read


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_one_sample_names_it_and_its_file(workers: int) -> None:
    with pytest.raises(ValueError, match="this is no number") as caught:
        read(Damaged(32, bad=[7]), workers=workers)
    assert caught.value.__notes__[0].startswith("sample 7 (file_7.txt); loader.on_bad_sample=skip ")
    assert workers == 0 or "in batch" in caught.value.__notes__[1]  # the traceback there


def test_bad_samples_are_replaced_alike_whatever_the_split() -> None:
    source = Damaged(40, bad=[3, 11, 12])

    def ids(**how: int) -> list[int]:
        found = read(source, skips=True, epochs=2, **how)
        assert sum(len(micro_batch.skipped) for micro_batch in found) == 2 * 3
        return sorted(chain.from_iterable(micro_batch.batch.tolist() for micro_batch in found if micro_batch.counts))

    alone = ids(workers=0)
    assert ids(workers=2) == ids(workers=0, world_size=3) == ids(workers=0, world_size=2, parts=3) == alone
    assert len(alone) == 80
    assert not {3, 11, 12} & set(alone)


def test_nothing_is_skipped_for_ever() -> None:
    with pytest.raises(DataError, match="nor can the 100 that were tried in its place"):
        read(Damaged(200, bad=range(200)), workers=0, skips=True)


class Turning(Numbers):
    """Sample i comes as its number, its epoch and one of its bits."""

    def alternate(self, batch: Tensor, keys: NDArray[np.uint64], epoch: int) -> Tensor:
        return torch.stack([batch, torch.full_like(batch, epoch), torch.from_numpy((keys >> np.uint64(1)).astype(np.int64))], dim=1)


@pytest.mark.parametrize("how", [{"workers": 0}, {"workers": 0, "world_size": 3, "parts": 2}, {"workers": 2, "world_size": 2}])
def test_what_alternates_is_told_the_epoch_and_has_the_same_key_in_all_of_them(how: dict[str, int]) -> None:
    found = torch.cat([each.batch for each in read(Turning(40), epochs=3, **how) if each.counts]).tolist()
    assert sorted((number, epoch) for number, epoch, _ in found) == [(number, epoch) for number in range(40) for epoch in range(3)]
    assert len({key for _, _, key in found}) == len({(number, key) for number, _, key in found}) == 40
