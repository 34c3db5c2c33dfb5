"""A key is waited for as long as it takes, or as long as somebody says."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import TypeVar

import pytest
from torch.distributed import DistError, DistStoreError, Store, TCPStore

from ddp_train.distributed import store as stores
from ddp_train.distributed.store import JoinedAttempt, agree_on_attempt, leave, round_trip_s, serve_store, wait_for
from ddp_train.errors import UserError


@pytest.fixture
def server() -> TCPStore:
    return serve_store("127.0.0.1", 0)


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(milliseconds=50))


def test_a_key_is_waited_for_beyond_the_time_out_of_the_store(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PATIENCE", timedelta(milliseconds=100))
    timer = Timer(0.5, server.set, ("key", "value"))
    timer.start()
    assert wait_for(client(server), "key") == "value"
    timer.join()


def test_the_time_that_is_given_is_the_most(server: TCPStore) -> None:
    began = time.monotonic()
    with pytest.raises(DistStoreError):
        wait_for(client(server), "key", within_s=1.0)
    assert 0.9 < time.monotonic() - began < 10
    server.set("key", "value")
    assert wait_for(client(server), "key", within_s=1.0) == "value"


def test_a_store_that_is_gone_is_no_reason_to_wait() -> None:
    server = serve_store("127.0.0.1", 0)
    connected = client(server)
    connected.set("here", "")
    del server
    with pytest.raises(DistError):
        wait_for(connected, "key")


Value = TypeVar("Value")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def patient_client(server: TCPStore) -> Store:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


def on_all(size: int, act: Callable[[int], Value]) -> list[Value]:
    """Do something as every rank at once."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, range(size)))


def attempt(store: TCPStore, size: int, remembered: dict[int, Path] | None = None) -> list[JoinedAttempt]:
    paths = remembered or {}
    return on_all(size, lambda rank: agree_on_attempt(patient_client(store), rank, size, continues_from=paths.get(rank), within_s=20))


def test_every_attempt_has_an_empty_place_of_its_own(store: TCPStore) -> None:
    for number in range(3):
        ranks = attempt(store, 3)
        assert not ranks[1].store.check(["key"])  # of the attempt before
        ranks[0].store.set("key", str(number))
        assert [rank.store.get("key") for rank in ranks] == [str(number).encode()] * 3


def test_a_dead_ranks_hello_is_not_mistaken_for_the_new_one(store: TCPStore) -> None:
    with pytest.raises(UserError, match="rank 0 did not answer"):
        agree_on_attempt(
            patient_client(store), 1, 2, continues_from=Path("/of/the/dead"), within_s=1
        )  # it wrote its hello, and then its rank 0 was gone
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agree_on_attempt, patient_client(store), 0, 2, continues_from=None, within_s=20)
        assert not waiting.done()
        other = agree_on_attempt(patient_client(store), 1, 2, continues_from=None, within_s=20)
        main = waiting.result()
    assert main.continues_from is other.continues_from is None
    main.store.set("key", "new")
    assert other.store.get("key") == b"new"


def test_one_rank_that_remembers_is_enough_for_all(store: TCPStore) -> None:
    assert {rank.continues_from for rank in attempt(store, 3)} == {None}
    assert {rank.continues_from for rank in attempt(store, 3, {2: Path("/runs/one")})} == {Path("/runs/one")}


def test_a_rank_that_does_not_come_is_named(store: TCPStore) -> None:
    with pytest.raises(UserError, match="of 3 ranks these did not join: 1, 2"):
        agree_on_attempt(patient_client(store), 0, 3, continues_from=None, within_s=0.3)


def test_parting_waits_for_all_and_for_no_one_who_is_gone(store: TCPStore) -> None:
    ranks = attempt(store, 3)
    on_all(3, lambda rank: leave(ranks[rank].store, rank, 3, within_s=20))
    assert int(ranks[0].store.add("left", 0)) == 2
    alone = attempt(store, 2)[0].store
    leave(alone, 0, 2, within_s=0.2)
    assert alone.check(["over"])  # who comes late need not wait


def test_the_way_to_the_store_is_measured_and_leaves_no_key(server: TCPStore) -> None:
    keys = server.num_keys()
    assert 0 < round_trip_s(server) < 1
    assert server.num_keys() == keys
