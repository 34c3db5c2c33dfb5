"""The first thing that ranks do together: agree on a place in the store that is new, and tell each other what they remember.

The store in which torchrun's ranks meet may be the agent's, and then it still holds the keys of earlier attempts: a process group that
reads them waits for processes that are dead (docs/decisions/0008-restart.md). Nor do all ranks know the number of the attempt, because
every agent counts its own restarts.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError, PrefixStore, Store

from ddp_train.distributed.store import wait_for
from ddp_train.errors import UserError
from ddp_train.system.deadline import wait_until

MEET_WITHIN_S = 300.0
LEAVE_WITHIN_S = 30.0
_POLL_S = 0.02
_FIRST_POLL_S = 0.001  # ranks that were started together are soon there


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all ranks."""

    store: Store  # empty at the beginning; every process group must be opened in it
    prefix: str  # where that lies, for another connection to the same server
    remembered: Path | None  # the folder that an earlier attempt worked in, as any of the ranks remembers it


def meet(store: Store, rank: int, size: int, *, remembered: Path | None, within_s: float = MEET_WITHIN_S) -> Attempt:
    """Agree with the other ranks on this attempt's place in the store, and on the folder to continue. Collective.

    Each rank says hello under its rank, with a name that nobody had before; rank 0 answers every name that it finds, also one that a dead
    rank has left, until all ranks have confirmed. So nobody takes a dead rank's word, and nobody is answered by a dead rank 0.

    Raises:
        UserError: a rank did not come.
    """
    name, store = uuid.uuid4().hex, PrefixStore("ddp_train", store)
    store.set(f"hello/{rank}", json.dumps({"name": name, "remembered": str(remembered or "")}))
    if rank == 0:
        return _welcome(store, size, within_s)
    deadline = time.monotonic() + within_s
    try:
        prefix = wait_for(store, f"answer/{name}", within_s=within_s)
        place = PrefixStore(prefix, store)
        place.set(f"here/{rank}", "")
        folder = wait_for(place, "begin", within_s=deadline - time.monotonic())
    except DistError:  # the store's own time-out, or the store is gone
        raise _missing(rank, "rank 0 did not answer", within_s) from None
    return Attempt(store=PrefixStore("attempt", place), prefix=f"ddp_train/{prefix}/attempt", remembered=Path(folder) if folder else None)


def leave(store: Store, rank: int, size: int, *, within_s: float = LEAVE_WITHIN_S) -> None:
    """Wait until every rank has come to its end, then leave, rank 0 last: the store may live in its process.

    Collective, but no failure when somebody is gone already.

    Args:
        store: the attempt's.
    """
    deadline = time.monotonic() + within_s
    try:
        if rank == 0:
            wait_until(
                lambda: all(store.check([f"done/{other}"]) for other in range(1, size)),
                within_s=within_s,
                every_s=_POLL_S,
                first_s=_FIRST_POLL_S,
            )
            store.set("over", "")
            left_s = deadline - time.monotonic()
            wait_until(
                lambda: all(store.check([f"left/{other}"]) for other in range(1, size)),
                within_s=left_s,
                every_s=_POLL_S,
                first_s=_FIRST_POLL_S,
            )
        else:
            store.set(f"done/{rank}", "")
            wait_for(store, "over", within_s=within_s)
            store.set(f"left/{rank}", "")
    except (DistError, RuntimeError):  # the others are gone, and the store with them
        return


def _welcome(store: Store, size: int, within_s: float) -> Attempt:
    """Answer every hello until all ranks have confirmed (rank 0)."""
    prefix = uuid.uuid4().hex
    place = PrefixStore(prefix, store)
    heard: dict[int, dict[str, str]] = {}
    absent = set(range(size))

    def is_complete() -> bool:
        for rank in sorted(absent):
            if store.check([f"hello/{rank}"]):
                hello = json.loads(store.get(f"hello/{rank}"))
                if hello != heard.get(rank):
                    heard[rank] = hello
                    store.set(f"answer/{hello['name']}", prefix)
            if rank == 0 or place.check([f"here/{rank}"]):
                absent.discard(rank)
        return not absent

    if not wait_until(is_complete, within_s=within_s, every_s=_POLL_S, first_s=_FIRST_POLL_S):
        raise _missing(0, f"of {size} ranks these did not come: {', '.join(map(str, sorted(absent)))}", within_s)
    folder = next((heard[rank]["remembered"] for rank in range(size) if heard[rank]["remembered"]), "")
    place.set("begin", folder)
    return Attempt(store=PrefixStore("attempt", place), prefix=f"ddp_train/{prefix}/attempt", remembered=Path(folder) if folder else None)


def _missing(rank: int, happened: str, within_s: float) -> UserError:
    return UserError(
        key="cluster",
        happened=f"rank {rank} waited {within_s:.0f} s for the others: {happened}",
        expected="all ranks, started by torchrun agents of the same rendezvous",
        fix="the logs of the ranks that are missing",
    )
