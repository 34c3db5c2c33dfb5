"""Measure the sizes of a run in a child process, which imports torch, may write nothing, and has a time limit."""

import errno
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ddp_train.config.run_config import RunConfig
from ddp_train.errors import DONE, ConfigError, UserError
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import file_in_memory, fork

WITHIN_S = 60.0  # with torch's import, which takes long from a file server
_POLL_S = 0.02
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = {
    **dict.fromkeys(("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"), "writes nothing"),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "os.truncate", "os.utime", "sqlite3.connect"), "writes nothing"),
    **dict.fromkeys(("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"), "opens no connection"),
    **dict.fromkeys(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"), "starts no process"),
}
"""Events of https://docs.python.org/3/library/audit_events.html -> the reason in the error."""


@contextmanager
def measuring(config: RunConfig, *, within_s: float = WITHIN_S) -> Iterator[Callable[[], dict[str, Any] | str]]:
    """Measure a run while the block runs, and yield a function that waits for the answer.

    It returns the sizes (`training.build.dry_build.Sizes`), or why they cannot be measured here. It raises a ConfigError when the parts of
    the run do not fit together, as its ranks would when they build it.
    """
    reply_file = file_in_memory(b"")

    def work() -> int:
        devnull = os.open(os.devnull, os.O_WRONLY)
        sys.stdout = sys.stderr = os.fdopen(devnull, "w")  # a user's data set may print; a plan does not show it
        for descriptor in (1, 2):
            os.dup2(devnull, descriptor)
        os.write(reply_file, pickle.dumps(_measured(config)))
        return DONE

    def sizes() -> dict[str, Any] | str:
        if not wait_until(lambda: child.exit_code() is not None, within_s=deadline - time.monotonic(), every_s=_POLL_S):
            return f"building it without values takes longer than {within_s:g} s"
        if not (content := os.pread(reply_file, os.fstat(reply_file).st_size, 0)):
            return "the process that built it without values has died"
        reply: dict[str, Any] | str | UserError = pickle.loads(content)
        if isinstance(reply, ConfigError) and reply.key.partition(".")[0] != "data":
            raise reply
        if isinstance(reply, UserError):  # the machines of the run may have it
            return str(UserError(key=reply.key, happened=reply.happened))
        return reply

    deadline, child = time.monotonic() + within_s, fork(work)
    try:
        yield sizes
    finally:
        os.close(reply_file)
        child.signal(signal.SIGKILL)
        child.wait()


def _measured(config: RunConfig) -> dict[str, Any] | str | UserError:
    """Build the run, and return its sizes or the error (in the child process)."""
    forbid_effects()
    try:
        from ddp_train.training.build import dry_build  # imports torch: in this process only

        return asdict(dry_build.measure(config))
    except UserError as error:
        return error
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def forbid_effects() -> None:
    """Let every attempt of this process to write, to reach the network or to start a process fail from now on, for good.

    The error is a PermissionError, as on a read-only machine without a network: code that can do without goes on. A library in C that
    opens files by itself is not stopped.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        reason = _REFUSED.get(event, "")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and path != os.devnull and not isinstance(path, int):
                reason = "writes nothing"
        if reason:
            raise PermissionError(errno.EPERM, f"ddp-train plan {reason}")

    tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"  # else tempfile looks for it by writing a file
    sys.addaudithook(hook)
