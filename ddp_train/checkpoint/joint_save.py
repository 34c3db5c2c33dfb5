"""One save, in a thread of every rank: each writes its file, rank 0 publishes what all have written, and all learn how it ended."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from torch.distributed import DistError, Store

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.publish import make_partial, publish
from ddp_train.checkpoint.snapshot import Snapshot
from ddp_train.checkpoint.verify import name_of, rank_file
from ddp_train.distributed.store import add_line, lines_of, wait_for
from ddp_train.distributed.world import World

logger = logging.getLogger(__name__)

_KEYS = ("made", "reports", "count", "all", "outcome")  # of one save, in the mailbox


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What one save is to write."""

    number: int  # counts the saves of a run
    folder: Path
    partial: Path  # where it is written, until it is complete
    step: int
    snapshot: Snapshot
    may_be_infinite: Callable[[str], bool]
    facts: Mapping[str, Any]  # for the manifest
    remove_old: Callable[[Path], None]
    wrote: Callable[[], None]  # called after each part that is written
    is_written: Event = field(default_factory=Event)  # this rank's part is, or never will be


@dataclass(frozen=True)
class _Report:
    """What a rank tells rank 0."""

    bytes: int
    xxh3_128: str = ""
    problem: str = ""
    needs_room: bool = False  # whether the problem is the disk's
    layout: dict[str, str] = field(default_factory=dict)  # of the shared state, by part


def write_together(order: SaveOrder, mailbox: Store, world: World) -> str:
    """Write this rank's part and wait for the others; return what went wrong on any rank, the same on all, or "".

    Raises:
        DistError: the store is gone, and with it the run.
    """
    number = order.number
    if world.is_main:
        mailbox.set(f"{number}/made", _attempt(lambda: make_partial(order.partial)))
    if problem := wait_for(mailbox, f"{number}/made"):
        report = _Report(order.snapshot.num_bytes, problem=problem if world.is_main else "", needs_room=True)
    else:
        report = _write_share(order, world.rank)
    # All reports are lines of one key, and are counted: rank 0 waits for the last of thousands, and reads once (docs/scale.md).
    add_line(mailbox, f"{number}/reports", [world.rank, asdict(report)])
    if mailbox.add(f"{number}/count", 1) == world.size:
        mailbox.set(f"{number}/all", "")
    order.is_written.set()
    if world.is_main:
        wait_for(mailbox, f"{number}/all")
        reports = dict(lines_of(mailbox, f"{number}/reports"))
        mailbox.set(f"{number}/outcome", _conclude(order, [_Report(**reports[rank]) for rank in range(world.size)]))
        for key in _KEYS:
            mailbox.delete_key(f"{number - 1}/{key}")  # who reports on this save has read the outcome of the one before
    return wait_for(mailbox, f"{number}/outcome")


def _write_share(order: SaveOrder, rank: int) -> _Report:
    snapshot, digest = order.snapshot, ""

    def write() -> None:
        nonlocal digest
        digest = tensor_file.write(order.partial / rank_file(rank), snapshot.header, snapshot.values.numpy().data, wrote=order.wrote)

    if lost := snapshot.not_finite(order.may_be_infinite):
        return _Report(snapshot.num_bytes, problem=f"{lost} is not finite: lost weights must not replace good ones")
    problem = _attempt(write)
    return _Report(snapshot.num_bytes, digest, problem, needs_room=bool(problem), layout=snapshot.layout())


def _conclude(order: SaveOrder, reports: list[_Report]) -> str:
    """Publish the checkpoint if all ranks have written their files, else remove them; return what went wrong (rank 0)."""
    problems = [f"rank {rank}: {report.problem}" for rank, report in enumerate(reports) if report.problem]
    problems = problems or _other_tensors(reports)
    needs_room = any(report.needs_room for report in reports)
    if not problems:
        files = {rank_file(rank): {"bytes": report.bytes, "xxh3_128": report.xxh3_128} for rank, report in enumerate(reports)}
        facts = {"step": order.step, "world_size": len(reports), **order.facts}
        problem = _attempt(lambda: publish(order.partial, order.folder / name_of(order.step), facts=facts, files=files))
        if not problem:
            if problem := _attempt(lambda: order.remove_old(order.folder)):
                logger.warning("old checkpoints were not removed: %s", problem)
            return ""
        problems, needs_room = [f"rank 0: {problem}"], True
    shutil.rmtree(order.partial, ignore_errors=True)  # it would keep a full disk full; what cannot be removed goes at the next start
    if needs_room:
        problems.append(f"It needs {_megabytes(sum(report.bytes for report in reports))}, {_free(order.folder)}")
    return ". ".join(problems)


def _other_tensors(reports: Sequence[_Report]) -> list[str]:
    """Return what the ranks do not have alike: each has divided its own state, and the shares would not fit together."""
    first, *others = (report.layout for report in reports)
    different = {
        rank: ", ".join(part for part in sorted(first | each) if first.get(part) != each.get(part)) for rank, each in enumerate(others, 1)
    }
    return [f"rank {rank}: it has other tensors than rank 0 in {names}" for rank, names in different.items() if names]


def _attempt(action: Callable[[], None]) -> str:
    """Do something, and return what went wrong, or "". Whatever it is, the other ranks wait to hear of it."""
    try:
        action()
    except DistError:
        raise
    except OSError as error:
        return f"{error.strerror or error}" + (f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else "")
    except Exception as error:
        logger.exception("a save failed")
        return f"{type(error).__name__}: {error}"
    return ""


def _free(folder: Path) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f"; `ulimit -f` allows a file {_megabytes(limit)}"
    try:
        return f"{_megabytes(shutil.disk_usage(folder).free)} are free{limited}"
    except OSError as error:
        return f"the free space is unknown ({error.strerror}){limited}"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"
