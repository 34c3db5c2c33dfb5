"""A rank is judged by its stack: the stacks of the very functions in which ranks wait, poll, read and compute."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from ddp_train.distributed.store import agree_on_attempt, leave, wait_for, wait_for_thread
from ddp_train.interfaces import Indices
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.loader import PositionedTrainLoader
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.reader import MicroBatch
from ddp_train.loader.sampler import Shuffled
from ddp_train.rank.peers import MessageKind, Neighbour, Peers, RankMessage
from ddp_train.rank.provenance import record_environment
from ddp_train.rank.stop import StepAgreement
from ddp_train.system.stack_dump import describe_stack
from ddp_train.watchdog import diagnosis
from tests.unit.loader.numbers import Numbers
from tests.unit.rank.together import three_worlds
from tests.unit.watchdog.test_diagnosis import native, view


def stack_in(work: Callable[[], object], *, then: Callable[[], object] = lambda: None) -> list[FrameSummary]:
    """Return the stack of a thread that is still at its `work` after a moment; `then` lets it end."""

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.2)
    frames = traceback.extract_stack(sys._current_frames()[thread.ident or 0])
    then()
    thread.join(timeout=10)
    assert not thread.is_alive()
    return list(frames)


def in_wait_for() -> list[FrameSummary]:
    store = HashStore()
    return stack_in(lambda: wait_for(store, "key"), then=lambda: store.set("key", ""))


def in_wait_for_thread() -> list[FrameSummary]:
    ended = threading.Event()
    hears = threading.Thread(target=ended.wait, daemon=True)
    hears.start()
    return stack_in(lambda: wait_for_thread(hears), then=ended.set)


def in_meeting() -> list[FrameSummary]:
    store = HashStore()
    return stack_in(
        lambda: agree_on_attempt(store, 0, 2, continues_from=None, within_s=10),
        then=lambda: agree_on_attempt(store, 1, 2, continues_from=None, within_s=10),
    )


def in_leaving() -> list[FrameSummary]:
    store = HashStore()
    return stack_in(lambda: leave(store, 0, 2), then=lambda: leave(store, 1, 2))


def peers() -> Peers:
    world = three_worlds()[0]
    assert world.store is not None
    return Peers(world, world.store, world.store, [Neighbour(1, 1), Neighbour(2, 1)])


def in_agreeing() -> list[FrameSummary]:
    agreement = StepAgreement(peers())
    agreement.open(MessageKind.STOP_AGREED, position=1)
    return stack_in(lambda: agreement.after(7), then=lambda: agreement.close(RankMessage(MessageKind.STOP_AGREED, 7)))


WAITS_FOR_RANKS: dict[str, Callable[[], list[FrameSummary]]] = {
    "a key in the store": in_wait_for,
    "a thread that hears from the others": in_wait_for_thread,
    "the first meeting": in_meeting,
    "the end": in_leaving,
    "the step after which all stop": in_agreeing,
    "what the others are doing": lambda: stack_in(peers().ask_others),
    "the others' end before the first step": lambda: stack_in(peers().leave_together),
}


@pytest.mark.parametrize("what", WAITS_FOR_RANKS)
def test_a_rank_that_waits_for_ranks_is_innocent(what: str) -> None:
    frames = WAITS_FOR_RANKS[what]()
    assert diagnosis._waits(view(0, frames)), frames
    assert Path(__file__).name in describe_stack(frames)  # what it waits for is of interest, not how


def test_a_rank_that_polls_for_a_file_waits_for_no_rank(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(run_folder=SimpleNamespace(config=(config := tmp_path / "config.yaml")))
    frames = stack_in(lambda: record_environment(job, three_worlds()[0]), then=config.touch)
    assert not diagnosis._waits(view(0, frames)), frames
    assert "provenance.py" in describe_stack(frames)


def test_a_rank_in_backward_may_wait_for_the_all_reduce_of_gradients() -> None:
    weight, seen = torch.ones(1, requires_grad=True), []
    (doubled := 2 * weight).register_hook(lambda gradient: seen.append(traceback.extract_stack()[:-1]))  # without the hook's own frame
    doubled.backward()
    assert diagnosis._waits(view(0, seen[0])), seen
    assert diagnosis._BACKWARD in seen[0][-1].filename


class Copied(Tensor):
    """A tensor whose copy to the device takes its time."""

    stacks: ClassVar[list[list[FrameSummary]]] = []

    def to(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        self.stacks.append(traceback.extract_stack()[:-1])
        return self


class Read(Numbers):
    """Numbers in a library that reads slowly."""

    stacks: ClassVar[list[list[FrameSummary]]] = []

    def batch(self, indices: Indices) -> Tensor:
        self.stacks.append(traceback.extract_stack())
        return super().batch(indices)


def test_a_rank_that_reads_samples_is_told_from_one_that_copies_them_to_its_gpu() -> None:
    with batch_on(torch.device("meta"), MicroBatch(torch.ones(2).as_subclass(Copied))):
        pass
    order = SampleOrder(Shuffled(8, seed=0), global_batch_size=2, drop_last=True)
    next(PositionedTrainLoader(Read(8), order, rank=0, world_size=1, grad_accum_steps=1, num_workers=0, pin_memory=False).micro_batches(0))
    assert diagnosis._waits_for_device(native(0, Copied.stacks[0])), Copied.stacks
    inside_ours = [frame for frame in Read.stacks[0] if "/ddp_train/" in frame.filename]
    assert not diagnosis._waits_for_device(native(0, inside_ours)), Read.stacks
    through_loader = [frame for frame in inside_ours if frame.filename.endswith(diagnosis._READS_NOTHING)]
    assert diagnosis._waits_for_device(native(0, through_loader)), "the loader itself reads nothing: it hands on"
    assert through_loader
    assert not diagnosis._waits_for_device(replace(native(0, through_loader), uses_device=False))
