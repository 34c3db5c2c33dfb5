"""A key is waited for as long as it takes, or as long as somebody says."""

from __future__ import annotations

import time
from datetime import timedelta
from threading import Timer

import pytest
from torch.distributed import DistError, DistStoreError, TCPStore

from ddp_train.distributed import store as stores
from ddp_train.distributed.store import serve_store, wait_for


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
