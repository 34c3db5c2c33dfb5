"""Iterable datasets of others: every sample once over the ranks and workers, and a state that is that of what was consumed."""

from __future__ import annotations

import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train.errors import ConfigError, ConfigErrors, DataError
from ddp_train.loader.dataset_adapter import Stream, is_stream
from ddp_train.loader.order import BatchOrder
from ddp_train.loader.reader import MicroBatch
from ddp_train.loader.stream import StreamEvaluationLoader, StreamTrainLoader, shard
from tests.unit.loader.streams import Counting, Sharding, Stateful, hugging_face, make
from tests.unit.parts import checked, components


def loader(
    dataset: Any, *, rank: int = 0, world_size: int = 1, batch: int = 12, parts: int = 1, workers: int = 0, fields: list[str] | None = None
) -> StreamTrainLoader:
    stream = Stream(dataset, fields)
    order = BatchOrder(stream.length, global_batch_size=batch)
    return StreamTrainLoader(stream, order, rank=rank, world_size=world_size, grad_accum_steps=parts, num_workers=workers, pin_memory=False)


def ids(micro_batches: list[MicroBatch]) -> list[list[int]]:
    found = []
    for micro_batch in micro_batches:
        batch = micro_batch.batch
        batch = batch["number"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (list, tuple)) else batch
        found.append(batch.tolist())
    return found


def test_a_global_batch_has_its_size_on_any_number_of_ranks_and_a_stream_that_ends_starts_again() -> None:
    for world_size in (1, 2, 3, 5):
        streams = [loader(Counting(24), rank=rank, world_size=world_size, batch=10, parts=2).micro_batches(0) for rank in range(world_size)]
        for _ in range(12):
            assert (
                sum(len(micro_batch.batch) for stream in streams for micro_batch in islice(stream, 2) if not micro_batch.is_stand_in) == 10
            )
    assert ids(list(islice(loader(Counting(24), batch=10).micro_batches(0), 4)))[2] == [20, 21, 22, 23, *range(24, 30)]  # set_epoch(1)


def test_a_rank_with_fewer_samples_than_micro_batches_gets_a_stand_in() -> None:
    found = list(islice(loader(Counting(24), rank=3, world_size=4, batch=10, parts=3).micro_batches(0), 6))
    assert [micro_batch.is_stand_in for micro_batch in found] == [False, False, True, False, False, True]
    assert ids(found) == [[3], [7], [7], [11], [15], [15]]  # what stands in is no sample of the stream


@pytest.mark.parametrize(
    ("kind", "rank", "world_size", "parts", "workers", "stops"),
    [
        ("stateful", 0, 1, 1, 0, [1, 4, 5, 9]),
        ("stateful", 2, 3, 3, 0, [1, 4, 5, 9]),
        ("stateful", 1, 2, 3, 2, [6]),
        ("stateful", 0, 2, 1, 3, [1]),
        ("hugging face, one file", 1, 2, 2, 0, [1, 4, 5, 9]),
        ("hugging face, many files", 1, 2, 1, 0, [5]),
    ],
)
def test_a_state_continues_after_what_was_consumed_not_after_what_was_read_ahead(
    kind: str, rank: int, world_size: int, parts: int, workers: int, stops: list[int], tmp_path: Path
) -> None:
    dataset = make(kind, tmp_path, length=52)

    def new() -> StreamTrainLoader:
        return loader(copy.deepcopy(dataset), rank=rank, world_size=world_size, parts=parts, workers=workers)

    first = new()
    stream = first.micro_batches(0)
    whole = ids(list(islice(stream, 14 * parts)))  # 168 samples: into the fourth pass
    for steps in stops:
        stopped = new()
        ahead = stopped.micro_batches(0)
        list(islice(ahead, steps * parts + 2))  # as if two micro-batches were on their way to the device
        state = stopped.state_dict(12 * steps)
        ahead.close()
        torch.save(state, tmp_path / "state.pt")

        resumed = new()
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert not [line for line in resumed.caveats(12 * steps) if "starts over" in line]
        rest = resumed.micro_batches(12 * steps)
        assert ids(list(islice(rest, (14 - steps) * parts))) == whole[steps * parts :]
        rest.close()
    stream.close()


def test_peeking_takes_nothing_from_the_stream() -> None:
    peeked = loader(Stateful(24), batch=4)
    assert peeked.peek().batch.tolist() == [0, 1, 2, 3]
    assert ids(list(islice(peeked.micro_batches(0), 1))) == [[0, 1, 2, 3]]


def test_a_state_is_not_taken_by_another_number_of_workers_and_that_is_said() -> None:
    first = loader(Stateful(24), batch=4)
    list(islice(first.micro_batches(0), 2))
    other = loader(Stateful(24), batch=4, workers=2)
    other.load_state_dict(first.state_dict(8))
    assert any("the stream starts over: the checkpoint has no state for this number of ranks" in line for line in other.caveats(8))


def test_a_state_that_would_execute_something_is_not_kept_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    strange = loader(Stateful(24, extra=Path("/")), batch=4)
    list(islice(strange.micro_batches(0), 3))
    assert strange.state_dict(8) == {}
    assert capsys.readouterr().out.count("the state of Stateful is not saved") == 1


def test_what_is_not_guaranteed_is_said(tmp_path: Path) -> None:
    def said(dataset: Any, **arguments: Any) -> str:
        return "\n".join(loader(dataset, **arguments).caveats(0))

    assert "each of 2 readers reads all of Counting and keeps one sample in 2" in said(Counting(24), world_size=2)
    assert "Counting has no state_dict and load_state_dict: after a resume samples may repeat" in said(Counting(24))
    assert "reads all" not in said(Sharding(24), world_size=2)
    assert said(Stateful(24)) == ""
    assert "shuffle buffer" in said(hugging_face(tmp_path, 24, files=1).shuffle(seed=0, buffer_size=4))
    assert said(hugging_face(tmp_path, 24, files=1)) == ""


def test_a_run_over_a_stream_of_unknown_length_needs_a_number_of_steps() -> None:
    base = ["data._target_=tests.unit.loader.streams.Counting", "+data.length=640", "model=mlp", "~metrics.tensorboard"]
    base += [f"~data.{name}" for name in ("split", "num_samples", "image_size", "channels", "num_classes", "noise", "seed")]
    base += ["~data.eval.split", "~data.eval.num_samples", "+data.eval.length=10", "model.image_shape=[1,1,1]", "model.num_classes=2"]
    with pytest.raises(
        ConfigErrors, match=r"(?s)trainer.max_steps: is null, and Counting does not say how many.*evaluation.every_steps: is null"
    ):
        checked(base=base)  # its class tells: no rank is started
    steps = ["trainer.max_steps=5", "evaluation.every_steps=5"]
    with pytest.raises(ConfigError, match=r"loader.on_bad_sample: is skip, and the data is a stream"):
        components("loader.on_bad_sample=skip", *steps, base=base)
    built = components(*steps, base=base)
    assert (built.total_steps, built.train_loader.order.epoch_size) == (5, None)


def test_a_reader_without_a_sample_is_an_error_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="no sample for reader 3 of 3"):
        next(loader(Counting(2), rank=2, world_size=3, batch=3).micro_batches(0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
def test_evaluation_reads_every_sample_once(world_size: int) -> None:
    loaders = [StreamEvaluationLoader(Stream(Stateful(10)), rank=rank, world_size=world_size, batch_size=3) for rank in range(world_size)]
    for _ in range(2):
        found = [micro_batch for each in loaders for micro_batch in each]
        assert sorted(chain.from_iterable(ids([micro_batch for micro_batch in found if not micro_batch.is_stand_in]))) == list(range(10))
        assert len({id(each) for each in loaders}) == world_size <= len(found)


def test_hugging_face_samples_are_tensors_and_fields_choose_among_them(tmp_path: Path) -> None:
    dataset = hugging_face(tmp_path, 8, files=1)
    pairs, numbers = next(loader(dataset, batch=4, fields=["pair", "number"]).micro_batches(0)).batch
    assert pairs.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert numbers.tolist() == [0, 1, 2, 3]


def test_epochs_are_those_of_a_length_in_whole_batches(tmp_path: Path) -> None:
    assert is_stream(Counting(3)) and is_stream(hugging_face(tmp_path, 4, 1)) and not is_stream([1])
    assert BatchOrder(100, global_batch_size=32).epoch_size == 128
    assert BatchOrder(100, global_batch_size=32, drop_last=True).epoch_size == 96
    assert (BatchOrder(None, global_batch_size=32).epoch_size, BatchOrder(100, global_batch_size=32).batch_at(128).epoch) == (None, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_takes_as_many_samples_as_it_is_told_to_over_all_ranks(world_size: int) -> None:
    stream = Stream(Counting(20), None)
    loaders = [StreamEvaluationLoader(stream, rank=rank, world_size=world_size, batch_size=3, max_samples=7) for rank in range(world_size)]
    assert sum(len(each.batch) for loader in loaders for each in loader if not each.is_stand_in) == 7


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
