"""Cut an iterable dataset of others into shards, by what it offers itself."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class StreamShard:
    """One of the disjoint parts of a stream: every `step`-th sample of `dataset`, from the one at `start` on."""

    dataset: Any
    start: int = 0
    step: int = 1

    def samples(self, *, is_resumed: bool = False) -> Iterator[Any]:
        """Iterate once over the shard; where it is resumed, the dataset goes on after a sample of this shard."""
        return islice(iter(self.dataset), self.step - 1 if is_resumed else self.start, None, self.step)


def shard(dataset: Any, index: int, count: int) -> StreamShard:
    """Return shard `index` of `count`. Together they have every sample of one pass once, where a pass is the same wherever it is read.

    In this order: Hugging Face's own split, WebDataset's (its tar files), the dataset's `shard(num_shards, index)`, and every `count`-th
    sample of the plain iterator, which is correct and reads everything `count` times.
    """
    if count == 1:
        return StreamShard(dataset)
    if comes_from(dataset, "datasets"):
        from datasets.distributed import split_dataset_by_node

        return StreamShard(split_dataset_by_node(dataset, rank=index, world_size=count))
    if _splits_its_shards(dataset):
        return StreamShard(_with_splitter(dataset, index, count))
    if hasattr(dataset, "shard"):
        return StreamShard(dataset.shard(num_shards=count, index=index))
    return StreamShard(dataset, start=index, step=count)


def reads_all(dataset: Any, count: int) -> bool:
    """Tell whether each of `count` shards takes reading the whole stream."""
    if count == 1 or _splits_its_shards(dataset):
        return False
    if comes_from(dataset, "datasets"):
        return bool(dataset.num_shards % count)
    return not hasattr(dataset, "shard")


def comes_from(dataset: Any, package: str) -> bool:
    """Tell whether a dataset's class is one of a package's, without importing it."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(dataset).__mro__)


def _splits_its_shards(dataset: Any) -> bool:
    """Tell whether a WebDataset pipeline has one of the library's stages that give each node some of the tar files."""
    if not comes_from(dataset, "webdataset") or not isinstance(getattr(dataset, "pipeline", None), list):
        return False
    from webdataset.shardlists import single_node_only, split_by_node

    return any(stage in (single_node_only, split_by_node) for stage in dataset.pipeline if callable(stage))


def _with_splitter(dataset: Any, index: int, count: int) -> Any:
    """Return the pipeline with our numbers in place of those that its splitters take from the environment."""
    from webdataset.shardlists import single_node_only, split_by_node, split_by_worker

    changed, stages, splitters = copy.copy(dataset), list(dataset.pipeline), (single_node_only, split_by_node)
    first = next(place for place, stage in enumerate(stages) if stage in splitters)
    stages[first] = partial(_every_nth, index=index, count=count)
    changed.pipeline = [stage for stage in stages if stage not in (*splitters, split_by_worker)]
    return changed


def _every_nth(source: Any, *, index: int, count: int) -> Iterator[Any]:
    return islice(source, index, None, count)
