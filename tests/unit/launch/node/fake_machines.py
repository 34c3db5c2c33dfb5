"""A registry with its attempts, and machines without agents that come to it over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_train.launch.job import Job, Training
from ddp_train.launch.node import attempts as attempts_module
from ddp_train.launch.node import registry as registry_module
from ddp_train.launch.node import wire
from ddp_train.launch.node.attempts import Attempts
from ddp_train.launch.node.registry import Registry
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode
from ddp_train.launch.node.wire import JsonMessage, Line, LineLost, connect, of_socket, proof
from ddp_train.launch.node_facts.facts import NodeFacts
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.network import WAITING, listen
from tests.unit.launch.node_facts.machines import facts
from tests.unit.parts import checked

FIRST = facts(node_rank=None)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let seconds pass in tenths of one."""
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    monkeypatch.setattr(registry_module, "SILENT_S", 1.0)
    monkeypatch.setattr(registry_module, "_STALE_S", 0.5)
    monkeypatch.setattr(registry_module, "_HELLO_WITHIN_S", 0.5)
    for name in ("_LAST_CALL_S", "_NAMED_AFTER_S", "_TELLS_S", "_SURVIVORS_S"):
        monkeypatch.setattr(attempts_module, name, 0.2)
    for name in ("_MARGIN_S", "_DIES_WITHIN_S"):
        monkeypatch.setattr(attempts_module, name, 0.5)
    monkeypatch.setattr(attempts_module, "_ABOUT_TO_BE_LOST_S", 0.6)
    monkeypatch.setattr(attempts_module, "_POLL_S", 0.01)


@dataclass
class Fake:
    """A machine that says what it is told to."""

    line: Line
    heard: list[JsonMessage] = field(default_factory=list)
    is_cut: bool = False
    ahead_s: float = 0.0  # its clock
    is_mute: bool = False  # when it is asked whether it sees the run folder
    says: dict[str, Any] = field(default_factory=dict)  # in its first message, in the place of what is right
    _task: asyncio.Task[None] | None = None

    def introduce(self, told: NodeFacts, *, node_rank: int | None = None, token: str = "", program: str = "", sees: bool = True) -> None:
        hello = {
            "name": told.host,
            "program": program or uuid.uuid4().hex,
            "pid": os.getpid(),
            "facts": replace(told.now(), node_rank=node_rank).to_json(),
        }
        self._task = asyncio.get_running_loop().create_task(self._listen(token, hello | self.says, sees))

    async def _listen(self, token: str, hello: dict[str, Any], sees: bool) -> None:
        with suppress(LineLost):
            while True:
                message = await self.line.receive()
                self.heard.append(message)
                if message["kind"] == "challenge":
                    shown = proof(token, by="node", over=message["nonce"], own="n1")
                    self.line.send("hello", nonce="n1", proof=shown, **hello)
                elif message["kind"] == "look" and not self.is_mute:
                    self.line.send("seen", utc=time.time() + self.ahead_s, sees=sees)
                elif message["kind"] == "welcome":
                    self.line.beat()
        self.is_cut = True

    async def hears(self, kind: str, *, count: int = 1, within_s: float = 5.0) -> JsonMessage:
        """Return the newest message of a kind, once there are so many."""
        async with asyncio.timeout(within_s):
            while len(found := [each for each in self.heard if each["kind"] == kind]) < count:
                await asyncio.sleep(0.01)
        return found[-1]

    def said(self) -> str:
        return "\n".join(each["text"] for each in self.heard if each["kind"] == "say")

    def ends(self, code: int) -> None:
        """Say that the agent of the newest attempt has ended."""
        number = max(each["number"] for each in self.heard if each["kind"] == "attempt")
        self.line.send("ended", attempt=number, code=code, why="")

    def freeze(self) -> None:
        """Fall silent, with the line open: a cable that is out."""
        assert self.line._beats is not None
        self.line._beats.cancel()


@dataclass
class Bed:
    """The first machine, and what comes to it."""

    registry: Registry
    attempts: Attempts
    port: int
    first: Fake
    end: asyncio.Task[int]
    run_folder: RunFolder
    fakes: list[Fake] = field(default_factory=list)

    async def comes(self, name: str, **told: Any) -> Fake:
        """Let a machine come."""
        how = {key: told.pop(key) for key in ("node_rank", "token", "program", "sees") if key in told}
        fake = Fake(await connect("127.0.0.1", self.port, within_s=5))
        for key in ("ahead_s", "is_mute", "says"):
            setattr(fake, key, told.pop(key, getattr(fake, key)))
        self.fakes.append(fake)
        fake.introduce(replace(FIRST, host=name, **told), **how)
        return fake

    async def code(self) -> int:
        async with asyncio.timeout(5):
            return await self.end


@asynccontextmanager
async def bed(folder: Path, *, nodes: tuple[int, int] = (2, 2), max_restarts: int = 0, **changes: Any) -> AsyncIterator[Bed]:
    """Serve a registry for machines of as many processes as the first, which has two.

    Args:
        changes: of the first machine's place; `first`, `token`, `work`, `join_timeout_s` and the `overrides` of the job too.
    """
    config, run_folder = checked("cluster.grace_s=1", *changes.pop("overrides", [])), RunFolder(folder)
    first, token = changes.pop("first", FIRST), changes.pop("token", "")
    cluster = replace(config.cluster, join_timeout_s=changes.pop("join_timeout_s", 30), grace_s=0)
    job = Job(config=config, run_folder=run_folder, command=[], overrides=[], work=changes.pop("work", Training()))
    listener = listen("127.0.0.1", 0)
    place = NodeRendezvous(min_nodes=nodes[0], max_nodes=nodes[1], token=token, listener=listener, **changes)
    this_node = ThisNode(rendezvous=place, cluster=cluster, facts=first, max_restarts=max_restarts, job=job)
    registry = Registry(this_node)
    attempts = Attempts(registry, this_node)
    tasks = set[asyncio.Task[None]]()

    def serve(line: Line, *, is_first: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(registry.serve(line, is_first=is_first))
        tasks.add(task)

    server = await asyncio.start_server(lambda reader, writer: serve(Line(reader, writer)), sock=listener, backlog=WAITING)
    ours, theirs = socket.socketpair()
    serve(await of_socket(theirs), is_first=True)
    own = Fake(await of_socket(ours))
    own.introduce(first, token=token)
    end = asyncio.get_running_loop().create_task(attempts.run())
    try:
        yield (found := Bed(registry, attempts, listener.getsockname()[1], own, end, run_folder))
    finally:
        server.close()
        for fake in (own, *found.fakes):
            fake.line.cut()
        for task in (end, *tasks, *(each._task for each in (own, *found.fakes) if each._task is not None)):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        if (unused := attempts.pop_store_listener()) is not None:
            unused.close()
        await asyncio.sleep(0.05)
