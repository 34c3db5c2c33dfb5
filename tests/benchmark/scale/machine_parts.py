"""What the first machine's registry and attempts do for all machines: each of eight ranks, over real sockets, and all in this process."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddp_train.errors import DONE, FAILED
from ddp_train.launch.node.wire import Line, LineLost, connect, proof
from ddp_train.launch.node_facts.file_list import FileList
from ddp_train.run_folder import failure
from ddp_train.run_folder.result import Result, Status
from tests.unit.launch.node.fake_machines import FIRST, Bed, bed

_RANKS = 8  # of a machine
_FILES, _KEYS = 300, 300  # of a project, and of its configuration: what each machine tells of itself
_OPEN_FILES = 64  # beside two for each machine
_RETRY_S = 0.5  # as launch/node/registry_client.py
_WITHIN_S = 120


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run of many machines: all come at once, one is lost and comes back, all end."""

    machines: int
    start_s: float  # from the first that comes until the last has heard that an attempt begins
    restart_s: float  # from the loss of one, whose ranks end at once everywhere, until the last has heard of the next attempt
    end_s: float  # until the run's exit code is known
    tries: int  # to be taken in, of all machines: one each where none had to come again
    told_bytes: int  # by the machines, to be taken in
    said_bytes: int  # to the machines, for a start; both but for the signs of life
    code: int


def attempts_of(ranks: int) -> Story:
    """Run so many ranks on machines of eight."""
    with _open_files(2 * ranks // _RANKS + _OPEN_FILES), _counted() as sent, tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_story(Path(folder), ranks // _RANKS, sent))


@dataclass
class _Member:
    """A machine without an agent. What it tells of itself was found out before: on a real one it costs the others nothing."""

    bed: Bed
    hello: dict[str, Any]
    attempts: int = 0  # that it has heard of
    tries: int = 0
    line: Line | None = field(default=None)

    async def take_part(self) -> None:
        """Come, and come again where the line ends."""
        while True:
            self.tries += 1
            with suppress(OSError, LineLost):
                self.line = await connect("127.0.0.1", self.bed.port, within_s=_WITHIN_S)
                await self._follow(self.line)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, line: Line) -> None:
        while True:
            message = await line.receive()
            if message["kind"] == "challenge":
                line.send("hello", nonce="n", proof=proof("", by="node", over=message["nonce"], own="n"), **self.hello)
            elif message["kind"] == "look":
                line.send("seen", utc=time.time(), sees=True)
            elif message["kind"] == "welcome":
                line.beat()
            elif message["kind"] == "attempt":
                self.attempts = message["number"]

    def ends(self, code: int) -> None:
        """Say that the agent of the newest attempt has ended."""
        assert self.line is not None
        self.line.send("ended", attempt=self.attempts, code=code, why="")


async def _story(folder: Path, count: int, sent: Counter[str]) -> Story:
    source = FileList(
        sizes={}, hashes={f"mine/part_{number}.py": f"{number:016x}" for number in range(_FILES)}, listed_by="git", is_whole=True
    )
    config = {f"group.key_{number}": number for number in range(_KEYS)}
    first = replace(FIRST, processes=_RANKS, nodes=str(count), source=source, config=config).now()
    batch = [f"trainer.global_batch_size={_RANKS * count}", "loader.micro_batch_size=1"]
    async with bed(folder, nodes=(count, count), max_restarts=1, first=first, join_timeout_s=_WITHIN_S, overrides=batch) as found:
        told = first.to_json()
        members = []
        for host in (f"node{number}" for number in range(1, count)):
            facts = told.replace(f'"{first.host}"', f'"{host}"', 1)
            members.append(_Member(found, {"name": host, "program": uuid.uuid4().hex, "pid": os.getpid(), "facts": facts}))
        began = time.perf_counter()
        tasks = [asyncio.create_task(member.take_part()) for member in members]
        try:
            await _until(lambda: _have_heard(found, members, number=1))
            started, of_start = time.perf_counter(), sent.copy()
            failure.from_exit(rank=0, pid=1, exit_code=-9).record(found.run_folder)
            assert members[-1].line is not None
            members[-1].line.cut()
            for each in (found.first, *members[:-1]):
                each.ends(FAILED)
            await _until(lambda: _have_heard(found, members, number=2))
            again = time.perf_counter()
            Result(status=Status.COMPLETED, step=3).write(found.run_folder.result)
            for each in (found.first, *members):
                each.ends(DONE)
            async with asyncio.timeout(_WITHIN_S):
                code = await found.end
            ended = time.perf_counter()
        finally:
            for member, task in zip(members, tasks, strict=True):
                task.cancel()
                if member.line is not None:
                    member.line.cut()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Story(
        machines=count,
        start_s=started - began,
        restart_s=again - started,
        end_s=ended - again,
        tries=sum(member.tries for member in members) - 1,  # but for the one that was lost
        told_bytes=of_start["hello"] + of_start["seen"],
        said_bytes=sum(of_start[kind] for kind in ("challenge", "look", "welcome", "attempt", "say")),
        code=code,
    )


def _have_heard(found: Bed, members: Sequence[_Member], *, number: int) -> bool:
    """Tell whether all machines have heard that an attempt begins, the first one, too."""
    of_first = max((message["number"] for message in found.first.heard if message["kind"] == "attempt"), default=0)
    return of_first == number and all(member.attempts == number for member in members)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not holds():
            await asyncio.sleep(0.02)


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the bytes of each kind of message."""
    sent, real = Counter[str](), Line.send

    def send(line: Line, kind: str, **fields: Any) -> None:
        before = line._writer.write
        with patch.object(line._writer, "write", lambda content: (sent.update({kind: len(content)}), before(content))):
            real(line, kind, **fields)

    with patch.object(Line, "send", send):
        yield sent


@contextmanager
def _open_files(count: int) -> Iterator[None]:
    """Allow so many open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(count, before[1])), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
