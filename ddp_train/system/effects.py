"""A process that may look and not touch: Python's own audit events refuse what would leave a trace."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    **dict.fromkeys(("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"), "writes nothing"),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "os.truncate", "os.utime", "sqlite3.connect"), "writes nothing"),
    **dict.fromkeys(("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"), "opens no connection"),
    **dict.fromkeys(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"), "starts no process"),
}
"""Events of https://docs.python.org/3/library/audit_events.html -> what a process that has refused them does not do."""


def refuse_effects(name: str) -> None:
    """Let every attempt of this process to write, to reach the network or to start a process fail from now on, for good.

    The error is a PermissionError, as on a machine that is read-only and has no network: what can do without goes on. It holds for
    Python code and for what is written through Python, not for a library in C that opens files by itself.

    Args:
        name: of what this process is, for the error.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        reason = _REFUSED.get(event, "")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and path != os.devnull and not isinstance(path, int):
                reason = "writes nothing"
        if reason:
            raise PermissionError(errno.EPERM, f"{name} {reason}")

    tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"  # else it is found by writing a file
    sys.addaudithook(hook)
