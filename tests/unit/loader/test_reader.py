"""A sample that cannot be read: named, or another one in its place."""

from __future__ import annotations

from itertools import chain

import pytest

from ddp_train.errors import DataError
from tests.unit.loader.numbers import Damaged, read


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
