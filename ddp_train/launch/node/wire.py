"""A line between a machine and the registry: one JSON object a line over TCP, and a sign of life each second in both directions.

Nothing that comes is unpickled. A node runs the job that the registry sends, so each proves to the other that it knows the token before
anything is done: by an HMAC over a number of the other's, so that the token itself never travels (`proof`). Without a token (a run by hand
without `cluster.rendezvous_id`) that proves nothing, and nothing is encrypted at any time.
"""

import asyncio
import hmac
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ddp_train.errors import printable

BEAT_S = 1.0
SILENT_S = 6.0  # a machine that has said nothing for so long is lost: to the others, and to itself
MAX_BYTES = 1 << 25  # of one line: facts with the hashes of thousands of files, or a job
_MAX_SHOWN = 4000  # characters

JsonMessage = dict[str, Any]  # as it comes, from anybody


class NewAttempt(NamedTuple):
    """What the registry sends to each machine of a new attempt."""

    number: int  # which attempt of the launch it is, from 1
    name: str
    rank: int  # of the machine
    nodes: int
    port: int  # of the attempt's store, on the first machine
    restarts: int
    max_restarts: int
    first_ranks: int  # how many ranks the first machine has
    job: str | None


class Ended(NamedTuple):
    """A machine's message that its agent of an attempt has ended."""

    attempt: int
    code: int
    why: str  # where the other machines have to be told


class Signalled(NamedTuple):
    """A machine's message that a stop signal has come to it."""

    signal: int
    is_final: bool


class LineLost(Exception):
    """The other end of a line is gone; the text says how, and follows its name."""


class LineSilent(LineLost):
    """The other end gives no sign of life; it may still be there."""


def proof(token: str, *, by: str, over: Any, own: Any) -> str:
    """Return a proof of knowing the token; `by`: node or registry: neither can send the other's proof back.

    `over` and `own`: nonces, random numbers that were never used before, of the side that is to be convinced and of the one that proves it.
    """
    return hmac.new(token.encode(), json.dumps([by, over, own]).encode(), "sha256").hexdigest()


def is_proven(received: Any, expected: str) -> bool:
    """Tell whether a proof is right, in a time that does not depend on how much of it is."""
    return hmac.compare_digest(str(received).encode("utf-8", "replace"), expected.encode())


def shown(text: Any, most: int = _MAX_SHOWN) -> str:
    """Return a text of another machine for a terminal: without control characters, and cut where it is too long."""
    return printable(str(text) if len(str(text)) <= most else f"{str(text)[:most]}...")


def reason(error: OSError) -> str:
    """Return why a line could not be had; asyncio's own text names the address again."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return os.strerror(error.errno) if error.errno else "no answer"


class Line:
    """One end of a line. Made by `connect`, or for a connection that was accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._heard = time.monotonic()
        self._beats: asyncio.Task[None] | None = None
        self.connection: socket.socket = writer.get_extra_info("socket")
        if self.connection.family in (socket.AF_INET, socket.AF_INET6):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def silent_s(self) -> float:
        """How long the other end has said nothing."""
        return time.monotonic() - self._heard

    def beat(self) -> None:
        """Send signs of life from now on."""
        self._beats = asyncio.get_running_loop().create_task(self._keep_beating())

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; it is lost when the line is."""
        with suppress(OSError, RuntimeError):
            if not self._writer.is_closing():
                self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def receive(self, *, silent_s: float | None = None) -> JsonMessage:
        """Return the next message. LineLost: the line has ended. LineSilent: not even a sign of life came for so long."""
        while True:
            try:
                async with asyncio.timeout(silent_s) as patience:
                    message: JsonMessage = json.loads(await self._reader.readline())
                is_beat = message["kind"] == "beat"
            except (OSError, ValueError, RecursionError, LookupError, TypeError):  # cut, longer than anything of ours, or no message
                if patience.expired():
                    raise LineSilent(f"has been silent for {silent_s:.0f} s") from None
                raise LineLost("ended its node program, or the connection was lost") from None
            self._heard = time.monotonic()
            if not is_beat:
                return message

    async def close(self) -> None:
        """Send what was not sent yet, and end the line; an agent that was forked meanwhile has a copy of the socket."""
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 0.5)
        self.cut()

    def cut(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._writer.close()

    async def _keep_beating(self) -> None:
        while True:
            self.send("beat")
            await asyncio.sleep(BEAT_S)


async def connect(host: str, port: int, *, within_s: float) -> Line:
    """Return a line to the registry. OSError: nothing listens there, or it cannot be reached in time."""
    # The name is looked up here and not in a thread of asyncio's: this process forks, and has no other thread.
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(connection, place), within_s)
        return await of_socket(connection)
    except BaseException:
        connection.close()
        raise


async def of_socket(connection: socket.socket) -> Line:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_BYTES)
    return Line(reader, writer)
