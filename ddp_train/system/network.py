"""Which of this machine's interfaces leads to another one. Asks the kernel; sends nothing."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SIOCGIFCONF = 0x8912  # of Linux: all IPv4 addresses with the names of their interfaces, a `struct ifreq` for each
_IFREQ = struct.Struct("16s 4x 4s 16x")  # name, family and port, address, the rest of the union
_MOST_ADDRESSES = 1024

WAITING = 16_384
"""How many may wait to be connected where thousands come at once; the kernel allows as many as net.core.somaxconn says."""


def address_towards(host: str) -> str:
    """Return the address that this machine has for a host; "" where that is this machine's loopback, or no route leads there."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # of UDP: chooses a route and an address, and no more
                address = str(probe.getsockname()[0]).partition("%")[0]
                return "" if ipaddress.ip_address(address).is_loopback else address
    return ""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; None: nobody knows."""
    with suppress(OSError, ValueError):
        found = ipaddress.ip_address(address)
        return _of_ipv4(found.packed) if found.version == 4 else _of_ipv6(found.packed.hex())
    return None


def interfaces() -> dict[str, list[str]]:
    """Return this machine's interfaces and their addresses, without those of IPv6 that lead no further than the next cable."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with suppress(OSError):
        for name, packed in _ipv4():
            found.setdefault(name, []).append(str(ipaddress.ip_address(packed)))
    with suppress(OSError):
        for name, digits in _ipv6():
            if not (address := ipaddress.ip_address(bytes.fromhex(digits))).is_link_local:
                found.setdefault(name, []).append(str(address))
    return found


def _of_ipv4(packed: bytes) -> str | None:
    return next((name for name, address in _ipv4() if address == packed), None)


def _of_ipv6(address: str) -> str | None:
    return next((name for name, other in _ipv6() if other == address), None)


def _ipv4() -> Iterator[tuple[str, bytes]]:
    buffer = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ.size))
    place, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(buffer), place))
    for name, address in _IFREQ.iter_unpack(buffer.tobytes()[: struct.unpack("iP", filled)[0]]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], address  # eth0:1 is a label for a second address of eth0


def _ipv6() -> Iterator[tuple[str, str]]:
    for fields in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
        yield fields[-1], fields[0]


def is_address(host: str) -> bool:
    """Tell whether a host is written as an address. What a name means differs between machines: to itself it may be 127.0.1.1."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
