"""A line between a machine and the registry: one JSON object a line over TCP, and a sign of life each second in both directions.

Nothing that comes is unpickled or run. Who does not know the token is not listened to (`registry.py`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from typing import Any

BEAT_S = 1.0
SILENT_S = 6.0
"""A machine that has said nothing for so long is lost: to the others, and to itself."""

MOST_BYTES = 1 << 25  # of one line: facts with the hashes of thousands of files, or a job
_RETRY_MS = 1000
_TCP_RTO_MAX_MS = 44  # of Linux 6.15: a cable that was out for seconds is used again after one, not after as long again

Message = dict[str, Any]


class Line:
    """One end of a line. Made by `connect`, or for a connection that was accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._heard = time.monotonic()
        self._beats: asyncio.Task[None] | None = None
        self.connection: socket.socket = writer.get_extra_info("socket")
        if self.connection.family in (socket.AF_INET, socket.AF_INET6):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):  # an older kernel
                self.connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RETRY_MS)

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

    async def receive(self, *, silent_s: float | None = None) -> Message | None:
        """Return the next message, or None when the line has ended.

        Raises:
            TimeoutError: not even a sign of life came for so long.
        """
        while True:
            waited = False
            try:
                async with asyncio.timeout(silent_s) as patience:
                    line = await self._reader.readline()
                message = json.loads(line) if line.endswith(b"\n") else None
            except (OSError, ValueError):  # broken, or longer than anything of ours; or no JSON
                waited = patience.expired()
                message = None
            if waited:
                raise TimeoutError
            self._heard = time.monotonic()
            if not isinstance(message, dict):
                return None
            if message.get("kind") != "beat":
                return message

    async def close(self) -> None:
        """Send what was not sent yet, and end the line; an agent that was forked meanwhile has a copy of the socket."""
        if self._beats is not None:
            self._beats.cancel()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 0.5)
        self.cut()

    def cut(self) -> None:
        """End the line at once."""
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
    """Return a line to the registry.

    Raises:
        OSError: nobody listens there, or it cannot be reached in time.
    """
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
    """Return a line over a socket that is connected."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_BYTES)
    return Line(reader, writer)
