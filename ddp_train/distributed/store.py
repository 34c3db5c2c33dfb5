"""The store of the ranks: who serves it, how to join it, and how to wait for a key; and the attempt that they make together in it.

The first thing that ranks do together is to agree on a place in the store that is new, and on where they begin (`agree_on_attempt`). The
store may be the agent's, and then it still holds the keys of earlier attempts: a process group that reads them waits for processes that
are dead (docs/decisions/0008-restart.md). Nor do all ranks know the number of the attempt, because every agent counts its own restarts.
"""

import json
import math
import secrets
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore

from ddp_train.errors import UserError
from ddp_train.system import process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.network import WAITING, is_address
from ddp_train.system.process import allow_open_files

_TIMEOUT = timedelta(minutes=10)
_KEYS_PER_REQUEST = 1024
_PATIENCE = _TIMEOUT  # a read is asked again after that: so a server whose machine has lost its power is found to be gone
MEET_WITHIN_S = 300.0
LEAVE_WITHIN_S = 30.0
_POLL_S = 0.02
_FIRST_POLL_S = 0.001  # ranks that were started together are soon there


def join_store() -> dist.Store:
    """Return the store in which the ranks meet, as torchrun's environment says."""
    address, port = process_env.store_address()
    if process_env.rank() == 0 and not process_env.agent_serves_store() and is_address(address):
        with suppress(OSError):  # not an address of this machine: behind a router that translates, say
            return serve_store(address, port)
    store: dist.Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]
    return store


def join_store_again(prefix: str) -> dist.Store:
    """Connect once more to the store that another process of this rank has joined."""
    return dist.PrefixStore(prefix, join_served(*process_env.store_address()))


def wait_for(store: dist.Store, key: str, *, within_s: float | None = None) -> str:
    """Return the value of a key as soon as it is there.

    `within_s`: how long that may take; less than a second counts as one. None: for ever.
    Raises DistError: the store is gone, or the time is over.
    """
    patience = _PATIENCE if within_s is None else timedelta(seconds=max(1.0, within_s))
    while True:
        started = time.monotonic()
        try:
            store.wait([key], patience)
            return str(store.get(key).decode())
        except dist.DistStoreError:
            if within_s is not None or time.monotonic() - started < _PATIENCE.total_seconds() / 2:
                raise  # the read has not waited so long


def add_line(store: dist.Store, key: str, value: Any) -> None:
    """Append a value to a key, as a line of JSON. All ranks append to one key, so that a reader asks once for thousands of ranks."""
    store.append(key, json.dumps(value) + "\n")  # type: ignore[attr-defined]  # torch's stubs lack it


def lines_of(store: dist.Store, key: str) -> list[Any]:
    """Return the values that were added to a key so far."""
    return [json.loads(line) for line in store.get(key).splitlines()] if store.check([key]) else []


def round_trip_s(store: dist.Store) -> float:
    """Return the seconds that 64 KiB take to the machine of the ranks' store and back, by the fastest of five tries."""
    store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    key = f"round_trip/{secrets.token_hex(8)}"
    tries = []
    for _ in range(5):
        started = time.perf_counter()
        store.set(key, "." * 2**16)
        store.get(key)
        tries.append(time.perf_counter() - started)
    store.delete_key(key)
    return min(tries)


def wait_for_thread(thread: Thread) -> None:
    """Wait, in the main thread, for a thread of this rank that hears from the other ranks: the watch on hangs sees a wait for ranks."""
    wait_until(lambda: not thread.is_alive(), within_s=math.inf, every_s=0.002)  # not join, in which it could be any thread


def set_all(store: dist.Store, keys: Sequence[str], value: str) -> None:
    for start in range(0, len(keys), _KEYS_PER_REQUEST):
        chunk = keys[start : start + _KEYS_PER_REQUEST]
        store.multi_set(chunk, [value] * len(chunk))  # type: ignore[attr-defined]  # torch's stubs lack it


def serve_store(address: str, port: int) -> TCPStore:
    """Return a store that is served here, on the interface that has this address; port 0 takes a free one."""
    address = address.strip("[]")
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return serve_store_on(socket.create_server(place, family=family, backlog=WAITING), address)


def serve_store_on(listener: socket.socket, address: str) -> TCPStore:
    """Return a store that is served on a listening socket that was handed over; this process finds it at the address."""
    port = listener.getsockname()[1]
    allow_open_files()  # each rank comes with five connections
    return TCPStore(address, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())


def join_served(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class JoinedAttempt:
    """One attempt at a run, as one of its ranks knows it: a restart is another one."""

    rank: int
    size: int  # how many ranks there are
    store: Store  # empty at the beginning; every process group must be opened in it
    prefix: str  # where that lies, for another connection to the same server
    continues_from: Path | None  # as any of the ranks remembers it (`RestartNote.continues_from`); None: this is the first attempt


def agree_on_attempt(store: Store, rank: int, size: int, *, continues_from: Path | None, within_s: float = MEET_WITHIN_S) -> JoinedAttempt:
    """Agree with the other ranks on this attempt's place in the store, and on what it continues from. Collective.

    Each rank says hello, with a name that no rank had before. Rank 0 answers every name that it finds, also one that a dead rank has left,
    until all ranks have confirmed. So a dead rank is not taken for a living one, and no rank takes the answer of a dead rank 0. All hellos
    are lines of one key, and are counted: rank 0 waits for thousands of ranks with one request, and not with one for each (docs/scale.md).

    Raises UserError: a rank did not come.
    """
    name = uuid.uuid4().hex
    store = PrefixStore("ddp_train", store)
    add_line(store, "hellos", {"rank": rank, "name": name, "continues_from": str(continues_from or "")})
    store.add("hellos/count", 1)
    if rank == 0:
        return _welcome(store, size, within_s)
    deadline = time.monotonic() + within_s
    try:
        prefix = wait_for(store, f"answer/{name}", within_s=within_s)
        place = PrefixStore(prefix, store)
        add_line(place, "here", rank)
        place.add("here/count", 1)
        beginning = wait_for(place, "begin", within_s=deadline - time.monotonic())
    except DistError:  # the store's own time-out, or the store is gone
        raise _missing(rank, "rank 0 did not answer", within_s) from None
    return _attempt_at(rank, size, place, prefix, beginning)


def leave(store: Store, rank: int, size: int, *, within_s: float = LEAVE_WITHIN_S) -> None:
    """Wait until every rank has come to its end, then leave, rank 0 last: the attempt's store may live in its process.

    Collective, but no failure when another rank is gone already.
    """
    deadline = time.monotonic() + within_s
    with suppress(DistError, RuntimeError):  # the others are gone, and the store with them
        if rank != 0:
            if store.add("done", 1) == size - 1:
                store.set("all_done", "")
            wait_for(store, "over", within_s=within_s)
            if store.add("left", 1) == size - 1:
                store.set("all_left", "")
        elif size > 1:
            with suppress(DistStoreError):  # another rank is gone
                wait_for(store, "all_done", within_s=within_s)
            store.set("over", "")
            if (left_s := deadline - time.monotonic()) > 0:
                wait_for(store, "all_left", within_s=left_s)


def _welcome(store: Store, size: int, within_s: float) -> JoinedAttempt:
    """Answer every hello until all ranks have confirmed (rank 0)."""
    prefix = uuid.uuid4().hex
    place = PrefixStore(prefix, store)
    remembered: dict[int, str] = {}  # rank -> what its newest hello says that the attempt continues from
    answered: set[str] = set()
    num_read = 0

    def is_complete() -> bool:
        nonlocal num_read
        if (num_hellos := store.add("hellos/count", 0)) > max(num_read, size - 1):  # no rank goes on before all are there
            num_read = num_hellos
            hellos = lines_of(store, "hellos")
            remembered.update({hello["rank"]: hello["continues_from"] for hello in hellos})
            new = [name for hello in hellos if (name := hello["name"]) not in answered]
            answered.update(new)
            set_all(store, [f"answer/{name}" for name in new], prefix)
        return bool(place.add("here/count", 0) == size - 1)

    if not wait_until(is_complete, within_s=within_s, every_s=_POLL_S, first_s=_FIRST_POLL_S):
        came = lines_of(place, "here") if answered else [hello["rank"] for hello in lines_of(store, "hellos")]
        absent = sorted({*range(1, size)}.difference(came))
        raise _missing(0, f"of {size} ranks these did not join: {', '.join(map(str, absent))}", within_s)
    beginning = next((remembered[rank] for rank in range(size) if remembered[rank]), "")
    place.set("begin", beginning)
    return _attempt_at(0, size, place, prefix, beginning)


def _attempt_at(rank: int, size: int, place: Store, prefix: str, beginning: str) -> JoinedAttempt:
    continues_from = Path(beginning) if beginning else None
    store = PrefixStore("attempt", place)
    return JoinedAttempt(rank=rank, size=size, store=store, prefix=f"ddp_train/{prefix}/attempt", continues_from=continues_from)


def _missing(rank: int, happened: str, within_s: float) -> UserError:
    happened = f"rank {rank} waited {within_s:.0f} s for the others: {happened}"
    expected = "all ranks, started by torchrun agents of the same rendezvous"
    return UserError(key="cluster", happened=happened, expected=expected, fix="see the logs of the missing ranks")
