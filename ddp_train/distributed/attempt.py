"""The first thing that ranks do together: agree on a place in the store that is new, and tell each other what they remember.

The store in which torchrun's ranks meet may be the agent's, and then it still holds the keys of earlier attempts: a process group that
reads them waits for processes that are dead (docs/decisions/0008-restart.md). Nor do all ranks know the number of the attempt, because
every agent counts its own restarts.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError, DistStoreError, PrefixStore, Store

from ddp_train.distributed.store import add_line, lines_of, set_all, wait_for
from ddp_train.errors import UserError
from ddp_train.system.deadline import wait_until

MEET_WITHIN_S = 300.0
LEAVE_WITHIN_S = 30.0
_POLL_S = 0.02
_FIRST_POLL_S = 0.001  # ranks that were started together are soon there


@dataclass(frozen=True, kw_only=True)
class Attempt:
    rank: int
    size: int  # how many ranks there are
    store: Store  # empty at the beginning; every process group must be opened in it
    prefix: str  # where that lies, for another connection to the same server
    remembered: Path | None  # the folder that an earlier attempt worked in, as any of the ranks remembers it


def agree_on_attempt(store: Store, rank: int, size: int, *, remembered: Path | None, within_s: float = MEET_WITHIN_S) -> Attempt:
    """Agree with the other ranks on this attempt's place in the store, and on the folder to continue. Collective.

    Each rank says hello, with a name that nobody had before; rank 0 answers every name that it finds, also one that a dead rank has left,
    until all ranks have confirmed. So nobody takes a dead rank's word, and nobody is answered by a dead rank 0. All hellos are lines of one
    key, and are counted: whoever waits for thousands asks one thing, and not one for each (docs/scale.md).

    Raises UserError: a rank did not come.
    """
    name, store = uuid.uuid4().hex, PrefixStore("ddp_train", store)
    add_line(store, "hellos", {"rank": rank, "name": name, "remembered": str(remembered or "")})
    store.add("hellos/count", 1)
    if rank == 0:
        return _welcome(store, size, within_s)
    deadline = time.monotonic() + within_s
    try:
        prefix = wait_for(store, f"answer/{name}", within_s=within_s)
        place = PrefixStore(prefix, store)
        add_line(place, "here", rank)
        place.add("here/count", 1)
        folder = wait_for(place, "begin", within_s=deadline - time.monotonic())
    except DistError:  # the store's own time-out, or the store is gone
        raise _missing(rank, "rank 0 did not answer", within_s) from None
    return _attempt_at(rank, size, place, prefix, folder)


def leave(store: Store, rank: int, size: int, *, within_s: float = LEAVE_WITHIN_S) -> None:
    """Wait until every rank has come to its end, then leave, rank 0 last: the attempt's store may live in its process.

    Collective, but no failure when somebody is gone already.
    """
    deadline = time.monotonic() + within_s
    try:
        if rank == 0:
            for last_word, answer in (("all_done", "over"), ("all_left", "")):
                with suppress(DistStoreError):  # somebody is gone
                    if size > 1 and (left_s := deadline - time.monotonic()) > 0:
                        wait_for(store, last_word, within_s=left_s)
                if answer:
                    store.set(answer, "")
        else:
            if store.add("done", 1) == size - 1:
                store.set("all_done", "")
            wait_for(store, "over", within_s=within_s)
            if store.add("left", 1) == size - 1:
                store.set("all_left", "")
    except (DistError, RuntimeError):  # the others are gone, and the store with them
        return


def _welcome(store: Store, size: int, within_s: float) -> Attempt:
    """Answer every hello until all ranks have confirmed (rank 0)."""
    prefix = uuid.uuid4().hex
    place = PrefixStore(prefix, store)
    remembered: dict[int, str] = {}  # by whom it was said last
    answered = set[str]()
    count = 0

    def is_complete() -> bool:
        nonlocal count
        if (found := store.add("hellos/count", 0)) > max(count, size - 1):  # nobody goes on before all are there
            count = found
            hellos = lines_of(store, "hellos")
            remembered.update({hello["rank"]: hello["remembered"] for hello in hellos})
            new = [name for hello in hellos if (name := hello["name"]) not in answered]
            answered.update(new)
            set_all(store, [f"answer/{name}" for name in new], prefix)
        return bool(place.add("here/count", 0) == size - 1)

    if not wait_until(is_complete, within_s=within_s, every_s=_POLL_S, first_s=_FIRST_POLL_S):
        came = lines_of(place, "here") if answered else [hello["rank"] for hello in lines_of(store, "hellos")]
        absent = sorted({*range(1, size)}.difference(came))
        raise _missing(0, f"of {size} ranks these did not come: {', '.join(map(str, absent))}", within_s)
    folder = next((remembered[rank] for rank in range(size) if remembered[rank]), "")
    place.set("begin", folder)
    return _attempt_at(0, size, place, prefix, folder)


def _attempt_at(rank: int, size: int, place: Store, prefix: str, folder: str) -> Attempt:
    store, whole = PrefixStore("attempt", place), f"ddp_train/{prefix}/attempt"
    return Attempt(rank=rank, size=size, store=store, prefix=whole, remembered=Path(folder) if folder else None)


def _missing(rank: int, happened: str, within_s: float) -> UserError:
    happened, fix = f"rank {rank} waited {within_s:.0f} s for the others: {happened}", "the logs of the ranks that are missing"
    return UserError(key="cluster", happened=happened, expected="all ranks, started by torchrun agents of the same rendezvous", fix=fix)
