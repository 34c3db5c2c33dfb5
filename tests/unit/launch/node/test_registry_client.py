"""What a machine believes of the registry that it comes to; whole runs are in tests/distributed/test_cluster.py."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_train.errors import ENVIRONMENT_REFUSES
from ddp_train.launch.node import registry_client
from ddp_train.launch.node.program import _NodeProgram
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode
from ddp_train.launch.node.wire import JsonMessage, Line, LineLost, is_proven, proof
from tests.unit.launch.node_facts.machines import facts
from tests.unit.parts import checked


async def come(*answers: JsonMessage, token: str = "ours") -> tuple[int, JsonMessage]:
    """Let a machine come to a registry that sends these messages after its hello; return its exit code, and the hello."""
    hello: JsonMessage = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        line.send("challenge", nonce="n0")
        hello.update(await line.receive())
        for answer in answers:
            line.send(**answer)
        with suppress(LineLost):
            await line.receive()
        await line.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    place = NodeRendezvous(min_nodes=2, max_nodes=2, node_rank=1, host=address[0], ports=(address[1],), token=token)
    cluster = replace(checked().cluster, join_timeout_s=20)
    machine = _NodeProgram(ThisNode(rendezvous=place, cluster=cluster, facts=facts("node1"), max_restarts=0))
    async with asyncio.timeout(10):
        code = await machine.run([])
    assert machine._client.line is not None
    machine._client.line.cut()  # a process that ends does that
    server.close()
    await asyncio.sleep(0.05)
    return code, hello


def test_nothing_is_taken_from_a_registry_that_does_not_know_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        for wrong in ({}, {"proof": "0" * 64}, {"proof": proof("theirs", by="registry", over="n1", own="n0")}):
            code, hello = await come({"kind": "welcome", "first": "node0", **wrong})
            assert code == ENVIRONMENT_REFUSES
            assert is_proven(hello["proof"], proof("ours", by="node", over="n0", own=hello["nonce"]))
            assert "token" not in hello and "ours" not in str(hello)
        assert "does not know this run's token" in capsys.readouterr().err
        code, hello = await come({"kind": "welcome", "first": "node0", "proof": hello["proof"]})  # its own, sent back
        assert code == ENVIRONMENT_REFUSES

    asyncio.run(story())


def test_what_a_registry_says_before_it_has_proven_anything_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"kind": "refused", "first": "node0", "is_foreign": False, "reasons": ["\x1b[2J"]}
    code, _ = asyncio.run(come({"kind": "say", "text": "\x1b]0;" + "x" * 100_000}, refused))
    said = capsys.readouterr().err
    assert code == ENVIRONMENT_REFUSES
    assert "\x1b" not in said and "\\x1b]0;xxx" in said and "node0 refuses this machine, node1:\n  \\x1b[2J" in said and len(said) < 5000


def test_a_folder_that_is_seen_some_moments_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_RETRY_S", 0.02)
    monkeypatch.setattr(registry_client, "_SEES_WITHIN_S", 0.3)

    async def story() -> None:
        assert await registry_client._sees("") and await registry_client._sees(str(tmp_path))
        assert not await registry_client._sees(str(tmp_path / "a/b"))
        asyncio.get_running_loop().call_later(0.1, os.mkdir, tmp_path / "late")
        assert await registry_client._sees(str(tmp_path / "late"))

    asyncio.run(story())
