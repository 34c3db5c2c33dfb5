"""The lease of a folder that other machines may see: a process that refreshes the holder's file as long as somebody holds the folder.

    python -m ddp_train.system.folder_lease FILE INTERVAL_S

A process, and not a thread of the holder: it lasts as long as the holder's agents, which may outlive it. Its standard input is a pipe whose
other end goes where the lock goes: to the holder, to what is forked from it and to its agents (`folder_lock.descriptors`). When the last of
them has ended, however it ended, the pipe is at its end, and so is this process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

from ddp_train.system.process import STOP_SIGNALS


def main(file: str, interval_s: float) -> None:
    """Refresh a file until nobody holds the other end of standard input."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # for the holder, which still has to save
    while not select.select([0], [], [], interval_s)[0]:
        with suppress(OSError):
            os.utime(file)  # the time of the file server, not ours


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
