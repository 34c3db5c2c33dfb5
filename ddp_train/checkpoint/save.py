"""Writing: the main thread copies the state; another thread writes it while training goes on.

    every rank, main thread    copies its share of the state into a buffer, starts the thread, and trains on
    rank 0's thread            makes .partial_step_00001000_NONCE
    every rank's thread        writes its file, hashes it meanwhile, waits until it is on the disk, and tells rank 0
    rank 0's thread            writes manifest.json and COMPLETE, renames the folder, removes old ones, and tells all how it ended

The threads leave messages for each other in the store of the ranks, over connections of their own (the mailbox). They call no collective:
the main thread's run meanwhile, and all ranks must call collectives in one order. A failed save is reported at once and its files are
removed; earlier checkpoints are not touched, and training goes on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed import DistError, HashStore, PrefixStore, Store

from ddp_train.checkpoint import tensor_file
from ddp_train.checkpoint.manifest import FileEntry, Manifest, Ranking, rank_file
from ddp_train.checkpoint.staging import StagedShare, StagingBuffer
from ddp_train.distributed.store import add_line, lines_of, wait_for, wait_for_thread
from ddp_train.distributed.world import World
from ddp_train.errors import DISK_REFUSES, readable_size
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, step_folder

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_KEYS = ("made", "reports", "count", "all", "outcome")  # what one save leaves in the mailbox


@dataclass(frozen=True, kw_only=True)
class Content:
    """The state that one rank gives to a save. Its tensors are on any device; the save copies them."""

    step: int
    shared: Mapping[str, Any]  # the same on every rank: each writes a share
    own: Mapping[str, Any]  # this rank's alone
    may_be_infinite: Callable[[str], bool]  # tells, for a tensor's name in `shared`, whether infinity is no sign of lost weights


@dataclass(kw_only=True)
class Saver:
    """Saves one run's checkpoints, one at a time. Every rank has one."""

    folder: Path  # where the checkpoints lie, on a file system that all ranks share
    world: World
    config_hash: str  # for the manifest
    run: str | None = None  # for the manifest: the run's id
    asynchronous: bool = True  # False: `save` returns when the checkpoint is there, or has failed
    remove_old: Callable[[Path], None] = lambda folder: None  # called with the folder after each save, on rank 0, in a thread
    on_progress: Callable[[], None] = lambda: None  # called while this rank waits for a slow disk that goes on writing

    def __post_init__(self) -> None:
        self._buffer = StagingBuffer(self.world.device)
        self._nonce = ""  # the same on all ranks, from the first save on
        self._mailbox: Store = HashStore()  # where there is more than one rank, replaced at the first save
        self._num_saves = 0
        self._chunks_written = 0
        self._under_way: tuple[Thread, PendingSave] | None = None
        self._problem: str | None = None
        self._error: Exception | None = None

    def make_room(self, num_bytes: int) -> None:
        """Begin to allocate the memory for the copy of this rank's share, about `num_bytes`, while training begins."""
        self._buffer.make_room(num_bytes)

    def save(self, content: Content, *, metrics: Mapping[str, Any] | None = None, ranked_by: Ranking | None = None) -> None:
        """Save a state, and in its manifest the metrics of its step and by which one checkpoints are ranked. Collective.

        Later changes of the state are not in the checkpoint. Waits for the save before it. Raises StateError: it cannot hold the state.
        """
        self.finish()
        if not self._nonce:
            self._nonce = self.world.from_main(lambda: secrets.token_hex(4))
            if self.world.store is not None and self.world.size > 1:  # a connection of the threads' own, at a place that no saver has used
                store = self.world.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
                self._mailbox = PrefixStore(f"checkpoint/{self._nonce}", store)
        origin = {"step": content.step, "run": self.run}
        staged = self._buffer.copy_state(content.shared, content.own, rank=self.world.rank, size=self.world.size, origin=origin)
        self._num_saves += 1
        manifest = Manifest(
            step=content.step,
            world_size=self.world.size,
            run=self.run,
            config_sha256=self.config_hash,
            torch=torch.__version__,
            metrics=metrics or {},
            ranked_by=ranked_by,
            files={},
        )
        pending = PendingSave(
            number=self._num_saves,
            partial=self.folder / f".partial_{step_folder(content.step)}_{self._nonce}_{self._num_saves}",
            staged=staged,
            may_be_infinite=content.may_be_infinite,
            manifest=manifest,
            remove_old=self.remove_old,
            on_progress=self._count_chunk,
        )
        thread = Thread(target=self._write, args=(pending,), name="checkpoint", daemon=True)
        self._under_way = thread, pending
        thread.start()
        if not self.asynchronous:
            self.finish()

    def finish(self) -> str | None:
        """Wait for the save that is under way; return the error of the last one, the same on all ranks, or None.

        Raises DistError: the store in which the ranks meet is gone, and with it another rank, or the agent.
        """
        if self._under_way is not None:
            thread, pending = self._under_way
            chunks_reported = self._chunks_written
            while not pending.is_written.is_set():
                time.sleep(_POLL_S)  # here a rank waits for its own disk; the watch on hangs sees it in the stack
                if self._chunks_written != chunks_reported:
                    chunks_reported = self._chunks_written
                    self.on_progress()
            wait_for_thread(thread)
            self._under_way = None
        if self._error is not None:
            raise self._error
        return self._problem

    def _count_chunk(self) -> None:
        self._chunks_written += 1

    def _write(self, pending: PendingSave) -> None:
        """Write the checkpoint, and report a failure (a thread)."""
        began = time.monotonic()
        try:
            self._problem = write_together(pending, self._mailbox, self.world)
        except Exception as error:
            logger.exception("the checkpoint of step %d was not saved", pending.manifest.step)
            self._error = error  # `finish` raises it again in the main thread, where a lost store is handled
            return
        finally:
            pending.is_written.set()
        if self._problem is None:
            logger.info("the checkpoint of step %d is written, in %.2f s", pending.manifest.step, time.monotonic() - began)
            return
        message = f"the checkpoint of step {pending.manifest.step} was NOT saved; earlier ones are unchanged. {self._problem}"
        logger.error(message)
        self.world.print(message)


@dataclass(frozen=True, kw_only=True)
class PendingSave:
    number: int  # counts the saves of one saver, from 1
    partial: Path  # where it is written until it is complete: in the folder of the other checkpoints
    staged: StagedShare
    may_be_infinite: Callable[[str], bool]
    manifest: Manifest  # without the files, which are not written yet
    remove_old: Callable[[Path], None]
    on_progress: Callable[[], None]  # called after each chunk that is written
    is_written: Event = field(default_factory=Event)  # set when this rank's share is written, or has failed


@dataclass(frozen=True)
class _Report:
    """A rank's report to rank 0 on the writing of its share."""

    bytes: int
    xxh3_128: str = ""
    problem: str | None = None
    needs_room: bool = False  # whether the disk refused: it is full, or there is a limit
    layout: dict[str, str] = field(default_factory=dict)  # a hash of each part of the shared state


def write_together(pending: PendingSave, mailbox: Store, world: World) -> str | None:
    """Write this rank's share and wait for the others; return the error of any rank, the same on all, or None.

    Raises DistError: the store is gone, and with it the run.
    """
    number = pending.number
    problem, needs_room = None, False
    if world.is_main:
        problem, needs_room = _failure_of(lambda: pending.partial.mkdir(0o750, parents=True))
        mailbox.set(f"{number}/made", problem or "")
    if wait_for(mailbox, f"{number}/made"):
        report = _Report(pending.staged.num_bytes, problem=problem, needs_room=needs_room)
    else:
        report = _write_share(pending, world.rank)
    # All reports are lines of one key, and are counted: rank 0 waits for the last of thousands, and reads once (docs/scale.md).
    add_line(mailbox, f"{number}/reports", [world.rank, asdict(report)])
    if mailbox.add(f"{number}/count", 1) == world.size:
        mailbox.set(f"{number}/all", "")
    pending.is_written.set()
    if world.is_main:
        wait_for(mailbox, f"{number}/all")
        reports = dict(lines_of(mailbox, f"{number}/reports"))
        mailbox.set(f"{number}/outcome", _publish_or_discard(pending, [_Report(**reports[rank]) for rank in range(world.size)]) or "")
        for key in _KEYS:
            mailbox.delete_key(f"{number - 1}/{key}")  # a rank that reports on this save has read the outcome of the one before
    return wait_for(mailbox, f"{number}/outcome") or None


def _write_share(pending: PendingSave, rank: int) -> _Report:
    staged = pending.staged
    if name := staged.broken_tensor(pending.may_be_infinite):
        return _Report(staged.num_bytes, problem=f"{name} has NaN or infinity: broken weights must not replace good ones")
    path = pending.partial / rank_file(rank)
    contents = (memoryview(staged.header), staged.values.numpy().data)
    digests: list[str] = []
    problem, needs_room = _failure_of(lambda: digests.append(tensor_file.write(path, contents, on_progress=pending.on_progress)))
    return _Report(staged.num_bytes, "".join(digests), problem, needs_room=needs_room, layout=staged.layout())


def _publish_or_discard(pending: PendingSave, reports: list[_Report]) -> str | None:
    """Publish the checkpoint if all ranks have written their files, else remove them; return the error, or None (rank 0)."""
    problems = [f"rank {rank}: {report.problem}" for rank, report in enumerate(reports) if report.problem is not None]
    problems = problems or _other_tensors(reports)
    needs_room = any(report.needs_room for report in reports)
    if not problems:
        files = {rank_file(rank): FileEntry(bytes=report.bytes, xxh3_128=report.xxh3_128) for rank, report in enumerate(reports)}
        manifest = replace(pending.manifest, files=files)
        final = pending.partial.with_name(step_folder(manifest.step))
        problem, needs_room = _failure_of(lambda: publish(pending.partial, final, manifest))
        if problem is None:
            problem, _ = _failure_of(lambda: pending.remove_old(final.parent))
            if problem is not None:
                logger.warning("old checkpoints were not removed: %s", problem)
            return None
        problems = [f"rank 0: {problem}"]
    shutil.rmtree(pending.partial, ignore_errors=True)  # it would keep a full disk full; the next start removes what is left
    if needs_room:
        problems.append(f"It needs {readable_size(sum(report.bytes for report in reports))}, {_free(pending.partial.parent)}")
    return ". ".join(problems)


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Turn the folder into a checkpoint: manifest and mark, everything on disk, one rename. Its files are on disk already (rank 0).

    Raises OSError: it could not be made durable, and is no checkpoint.
    """
    text = manifest.to_bytes()
    tensor_file.write(partial / MANIFEST, [memoryview(text)])
    tensor_file.write(partial / COMPLETE, [memoryview(hashlib.sha256(text).hexdigest().encode() + b"\n")])
    _sync(partial)
    if os.path.lexists(final):  # a rename would replace an empty folder
        raise FileExistsError(f"{final.name} exists already")
    os.rename(partial, final)
    try:
        _sync(final.parent)
    except OSError:
        with suppress(OSError):
            os.rename(final, partial)  # what may be gone after a power cut does not count
        raise


def _other_tensors(reports: Sequence[_Report]) -> list[str]:
    """Return the parts that differ between ranks: each rank has divided its own state, and the shares would not fit together."""
    first, *others = (report.layout for report in reports)
    problems = []
    for rank, layout in enumerate(others, 1):
        if parts := [part for part in sorted(first | layout) if first.get(part) != layout.get(part)]:
            problems.append(f"rank {rank}: its tensors differ from rank 0's in {', '.join(parts)}")
    return problems


def _failure_of(action: Callable[[], None]) -> tuple[str | None, bool]:
    """Call `action`; return its error, or None, and whether the disk refused it. It raises nothing: the other ranks wait for a report."""
    try:
        action()
    except DistError:
        raise
    except OSError as error:
        file = f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else ""
        return f"{error.strerror or error}{file}", error.errno in DISK_REFUSES
    except Exception as error:
        logger.exception("a save failed")
        return f"{type(error).__name__}: {error}", False
    return None, False


def _free(folder: Path) -> str:
    try:
        return f"{readable_size(shutil.disk_usage(folder).free)} are free"
    except OSError as error:
        return f"the free space is unknown ({error.strerror})"


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
