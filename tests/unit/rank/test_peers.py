"""The line between ranks, as threads of this process; real ranks are in tests/distributed/test_failure.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddp_train.distributed.world import alone
from ddp_train.rank import peers as peers_module
from ddp_train.rank.peers import MessageKind, Peers, RankMessage
from ddp_train.system.process import is_alive
from tests.unit.rank.together import three_ends, three_worlds

Heard = dict[int, list[tuple[int, RankMessage]]]


@contextmanager
def three_lines(*, reading: tuple[int, ...] = (0, 1, 2)) -> Iterator[tuple[list[Peers], Heard]]:
    """Give the lines of three ranks, and what those that read have heard; the lines are closed afterwards."""
    lines = three_ends(three_worlds())
    heard: Heard = {rank: [] for rank in reading}

    def read(rank: int) -> None:
        heard[rank].extend(lines[rank].messages())

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in reading]
    for thread in threads:
        thread.start()
    yield lines, heard
    for line in reversed(lines):
        line.close()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_every_rank_gets_all_messages_in_the_same_order() -> None:
    with three_lines() as (lines, heard):
        senders = [
            threading.Thread(target=lambda line=line: [line.send(MessageKind.STOP, number) for number in range(20)]) for line in lines
        ]  # type: ignore[misc]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    assert heard[0] == heard[1] == heard[2]
    assert [number for number, _ in heard[0]] == list(range(1, 61))
    assert sorted(message.number for _, message in heard[0]) == sorted([*range(20)] * 3)


def test_the_others_say_what_they_are_doing_and_who_cannot_is_named() -> None:
    with three_lines(reading=(0, 2)) as (lines, heard):
        lines[2].report_activity("in backward", has_lost_rank=True)
        started = time.monotonic()
        assert lines[0].ask_others() == {1: "gave no answer", 2: "in backward"}
        assert peers_module.REPLIES_S <= time.monotonic() - started < 5 * peers_module.REPLIES_S
    assert lines[2].has_lost_rank and not lines[0].has_lost_rank
    assert heard == {0: [], 2: []}  # the line answers by itself


def test_a_rank_that_has_ended_is_found_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with three_lines(reading=(2,)) as (lines, _):
        assert lines[0].dead_neighbour() is None
        gone = os.getpid()
        monkeypatch.setattr(peers_module, "is_alive", lambda pid: pid != gone and is_alive(pid))
        assert lines[0].dead_neighbour() == (1, gone)
        assert lines[0].ask_others() == {}


def test_one_rank_asks_for_all_and_those_that_come_later_let_it_tell() -> None:
    with three_lines() as (lines, _):
        first = lines[1].ask_others()
        started = time.monotonic()
        assert lines[0].ask_others() == lines[2].ask_others() == {}
        assert time.monotonic() - started < peers_module.REPLIES_S, "the first had heard all"
        assert sorted(first) == [0, 2] and "gave no answer" not in first.values()
        assert int(lines[0]._store.add("messages", 0)) == 1
        assert int(lines[0]._store.add("replies", 0)) == 2


def test_rank_0_leaves_when_the_others_have_left() -> None:
    with three_lines(reading=()) as (lines, _):
        leaving = threading.Thread(target=lines[0].leave_together)
        leaving.start()
        lines[1].leave_together()
        assert leaving.is_alive()
        lines[2].leave_together()
        leaving.join(timeout=10)
        assert not leaving.is_alive()


def test_alone_there_is_nobody_to_ask() -> None:
    line = Peers.connect(alone())
    assert line.is_alone
    assert line.ask_others() == {}
    assert line.dead_neighbour() is None
    line.leave_together()
    line.close()
