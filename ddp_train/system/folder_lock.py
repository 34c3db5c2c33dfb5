"""One run per folder: a lock of the kernel and, where that does not reach, a lease keep it.

The lock (flock on the folder itself) decides on one machine: the kernel drops it with the last process that has it, so a dead holder never
needs clearing away. `.holder.json` says who has it. On a file system that several machines share, the lock may hold on one machine alone
(NFS without locking, Lustre with localflock); there a lease process refreshes the holder's file, and another machine waits until the file
was not refreshed for three intervals:

    python -m ddp_train.system.folder_lock FILE INTERVAL_S

The lease process lasts as long as the holder's agents, which may outlive the holder. Its standard input is a pipe, whose other end is open
in the same processes as the lock: the holder, its forks and its agents (`descriptors`). When the last of them has ended, the pipe ends.
"""

import contextlib
import fcntl
import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_train.errors import ConfigError
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json
from ddp_train.system.process import STOP_SIGNALS, boot_id, is_alive

REFRESH_S = 10.0
HOLDER = ".holder.json"  # in a folder that is worked in: host, process, command and start of the process that holds it
_STALE_AFTER = 3  # intervals without a refresh
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "glusterfs", "fuse", "virtiofs", "orangefs")
_FLOCK = "hhqqi0q"  # struct flock of Linux: type, whence, start, length (0: to the end), pid


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that works in a folder."""

    host: str
    pid: int
    command: str
    started: str
    boot: str  # the machine's id of this boot: tells machines apart that have one name, and a machine from itself before a restart

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, started {self.started}: {self.command}"


@dataclass
class _Locked:
    folder: Path
    descriptor: int
    owner: int  # the process that took it; its forks and its agents have copies of the descriptor
    lease: subprocess.Popen[bytes] | None  # where other machines may see the folder


_locked: list[_Locked] = []


def lock(folder: Path, *, key: str, within_s: float = 0.0) -> None:
    """Lock a folder for this process and its agents, which inherit the descriptor, until the last of them ends.

    `within_s`: how long to wait for a run that is just ending.
    Raises ConfigError: another run has locked it; the message says who.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # the folder itself is locked: no file that could be left behind
    if not wait_until(lambda: _try_lock(descriptor, folder) and not _is_leased(folder), within_s=within_s, every_s=0.1):
        os.close(descriptor)
        holder = holder_of(folder)
        lease = "" if holder is None or is_here(holder) else f", or {_STALE_AFTER * REFRESH_S:.0f} s when that machine is gone"
        happened = f"another run is working in {folder}" + (f" ({holder})" if holder else "")
        raise ConfigError(key=key, happened=happened, expected="one run per folder", fix=f"wait for it{lease}, or choose another folder")
    with contextlib.suppress(OSError, AttributeError):  # no such locks, or a Python without them: `is_locked` goes by the holder's file
        _record_lock(descriptor, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
    _write(folder)
    _locked.append(_Locked(folder, descriptor, os.getpid(), _lease(folder / HOLDER) if is_shared(folder) else None))


def is_locked(folder: Path) -> bool:
    """Tell whether a process works in a folder, without locking it for a moment: a run that starts just then must not find it locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it is gone, or cannot be read
        return False
    try:
        return _record_lock(descriptor, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK or _is_leased(folder)
    except (OSError, AttributeError):
        return _is_alive(holder_of(folder)) or _is_leased(folder)
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> Holder | None:
    """Return the holder that a folder names; `is_locked` tells whether it still works there."""
    try:
        return Holder(**json.loads((folder / HOLDER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_here(holder: Holder) -> bool:
    """Tell whether a holder is a process of this machine."""
    return holder.boot == boot_id()


def descriptors() -> list[int]:
    """Return the descriptors that an agent inherits: locked folders and the pipes of leases; both last while any process has them open."""
    leases = [locked.lease.stdin.fileno() for locked in _locked if locked.lease is not None and locked.lease.stdin is not None]
    return [*(locked.descriptor for locked in _locked), *leases]


def unlock_all() -> None:
    """Unlock every folder that this process has locked. A forked process closes its copies alone."""
    while _locked:
        locked = _locked.pop()
        is_owner, lease = locked.owner == os.getpid(), locked.lease
        if lease is not None and lease.stdin is not None:
            lease.stdin.close()
            if is_owner:
                lease.kill()
                lease.wait()
            else:
                lease.returncode = 0  # the owner's child, which this process cannot wait for
        if is_owner:
            with contextlib.suppress(OSError):
                (locked.folder / HOLDER).unlink()
        os.close(locked.descriptor)


def _try_lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: a live holder on this machine counts as a lock
        return not _is_alive(holder_of(folder))
    return True


def _record_lock(descriptor: int, command: int, kind: int) -> int:
    """Set a record lock (the kernel's other kind), or ask whether one is set; return the answer (F_UNLCK: no).

    flock can only be asked for by taking it. This second lock excludes no process and can be asked for (fcntl(2), open file description
    locks); forks inherit it, and it ends as flock's does. Raises OSError: the file system has no such locks.
    """
    answer: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, command, struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)))[0]
    return answer


def _lease(file: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that refreshes the holder's file."""
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(file), str(REFRESH_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal and an agent signal the holder's whole group
        )
    except OSError as error:
        print(f"another machine may take {file.parent}: {file.name} is not refreshed ({error.strerror})", file=sys.stderr)
        return None


def _is_leased(folder: Path) -> bool:
    """Tell whether another machine has a valid lease on a folder, by the clock of the file system."""
    holder = holder_of(folder)
    if holder is None or is_here(holder):
        return False
    probe = folder / f".probe.{socket.gethostname()}.{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime - (folder / HOLDER).stat().st_mtime < _STALE_AFTER * REFRESH_S
    except OSError:  # it has just been released, or nothing can be written here, which is reported soon
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _write(folder: Path) -> None:
    holder = Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        command=shlex.join(sys.argv),
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
        boot=boot_id(),
    )
    try:
        write_json(folder / HOLDER, asdict(holder))
    except OSError as error:  # a full disk, say: the lock holds without it
        print(f"{folder}/{HOLDER} cannot be written: {error.strerror}", file=sys.stderr)


def _is_alive(holder: Holder | None) -> bool:
    return holder is not None and is_here(holder) and holder.pid != os.getpid() and is_alive(holder.pid)


def is_shared(folder: Path) -> bool:
    """Tell whether other machines may see a folder, by the kind of its file system."""
    try:
        mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    resolved = folder.resolve()
    kinds = {Path(before.split()[4].replace("\\040", " ")): after.split()[0] for before, after in mounts}
    return kinds[max((mount for mount in kinds if resolved.is_relative_to(mount)), key=lambda mount: len(mount.parts))].startswith(_SHARED)


def _refresh(file: str, interval_s: float) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the signal is for the holder, which still has to save
    while not select.select([0], [], [], interval_s)[0]:
        with contextlib.suppress(OSError):
            os.utime(file)  # the time of the file server, not ours


if __name__ == "__main__":
    _refresh(sys.argv[1], float(sys.argv[2]))
