"""A stream is cut so that all of it is read once."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ddp_train.loader.stream_shard import shard
from tests.unit.loader.streams import make


def value_of(sample: Any) -> int:
    return int(sample["number"]) if isinstance(sample, dict) else int(sample[0]) if isinstance(sample, (tuple, list)) else int(sample)


KINDS = ["counting", "stateful", "sharding", "web", "hugging face, one file", "hugging face, many files"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # WebDataset leaves its files to the garbage collector
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_shards_together_have_every_sample_once(kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": str(count), "WORKER": "0", "NUM_WORKERS": "2" if count > 1 else "1"}.items():
        monkeypatch.setenv(name, value)  # what WebDataset's own splitters would look at
    dataset = make(kind, tmp_path)
    found = [[value_of(sample) for sample in shard(dataset, index, count).samples()] for index in range(count)]
    assert sorted(chain.from_iterable(found)) == list(range(24))
    assert kind == "web" or {len(part) for part in found} == {24 // count}  # that one gives whole tar files
