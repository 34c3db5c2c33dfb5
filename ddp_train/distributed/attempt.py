"""The first thing that ranks do together: agree on a place in the store that is new, and on where they begin.

The store in which torchrun's ranks meet may be the agent's, and then it still holds the keys of earlier attempts: a process group that
reads them waits for processes that are dead (docs/decisions/0008-restart.md). Nor do all ranks know the number of the attempt, because
every agent counts its own restarts.
"""

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
    """One attempt at a run, as one of its ranks knows it: a restart is another one."""

    rank: int
    size: int  # how many ranks there are
    store: Store  # empty at the beginning; every process group must be opened in it
    prefix: str  # where that lies, for another connection to the same server
    begins_at: Path | None  # as any of the ranks remembers it (`RestartNote.begins_at`); None: this is the first attempt


def agree_on_attempt(store: Store, rank: int, size: int, *, begins_at: Path | None, within_s: float = MEET_WITHIN_S) -> Attempt:
    """Agree with the other ranks on this attempt's place in the store, and on where it begins. Collective.

    Each rank says hello, with a name that no rank had before. Rank 0 answers every name that it finds, also one that a dead rank has left,
    until all ranks have confirmed. So a dead rank is not taken for a living one, and no rank takes the answer of a dead rank 0. All hellos
    are lines of one key, and are counted: rank 0 waits for thousands of ranks with one request, and not with one for each (docs/scale.md).

    Raises UserError: a rank did not come.
    """
    name = uuid.uuid4().hex
    store = PrefixStore("ddp_train", store)
    add_line(store, "hellos", {"rank": rank, "name": name, "begins_at": str(begins_at or "")})
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


def _welcome(store: Store, size: int, within_s: float) -> Attempt:
    """Answer every hello until all ranks have confirmed (rank 0)."""
    prefix = uuid.uuid4().hex
    place = PrefixStore(prefix, store)
    remembered: dict[int, str] = {}  # rank -> where its newest hello says that the attempt begins
    answered, num_read = set[str](), 0

    def is_complete() -> bool:
        nonlocal num_read
        if (num_hellos := store.add("hellos/count", 0)) > max(num_read, size - 1):  # no rank goes on before all are there
            num_read = num_hellos
            hellos = lines_of(store, "hellos")
            remembered.update({hello["rank"]: hello["begins_at"] for hello in hellos})
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


def _attempt_at(rank: int, size: int, place: Store, prefix: str, beginning: str) -> Attempt:
    begins_at, store = Path(beginning) if beginning else None, PrefixStore("attempt", place)
    return Attempt(rank=rank, size=size, store=store, prefix=f"ddp_train/{prefix}/attempt", begins_at=begins_at)


def _missing(rank: int, happened: str, within_s: float) -> UserError:
    happened = f"rank {rank} waited {within_s:.0f} s for the others: {happened}"
    expected = "all ranks, started by torchrun agents of the same rendezvous"
    return UserError(key="cluster", happened=happened, expected=expected, fix="see the logs of the missing ranks")
