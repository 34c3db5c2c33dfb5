"""A long cable: pass frames between two taps, each after a while. For kernels without netem.

python -m tests.cluster.far TAP TAP SECONDS
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST_FRAME = 65_600


def main(names: list[str], delay_s: float) -> None:
    taps = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in names]
    for tap, name in zip(taps, names, strict=True):
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    under_way: deque[tuple[float, int, bytes]] = deque()  # when a frame arrives, and at which tap
    print("ready", flush=True)
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for tap in select.select(taps, [], [], patience)[0]:
            frame = os.read(tap, _LONGEST_FRAME)
            under_way.append((time.monotonic() + delay_s, taps[1 - taps.index(tap)], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, tap, frame = under_way.popleft()
            try:
                os.write(tap, frame)
            except OSError:  # its host is off, or its queue is full
                continue


if __name__ == "__main__":
    main(sys.argv[1:3], float(sys.argv[3]))
