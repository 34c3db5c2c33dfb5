"""This machine's network interfaces, and which of them leads to another machine. Asks the kernel; sends nothing."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SIOCGIFCONF = 0x8912  # asks Linux for all IPv4 addresses with the names of their interfaces, a `struct ifreq` for each
_IFREQ = struct.Struct("16s 4x 4s 16x")  # name, family and port, address, the rest of the union
_MAX_ADDRESSES = 1024

WAITING = 16_384  # how many connections may wait to be accepted where thousands come at once; net.core.somaxconn limits it


def address_towards(host: str) -> str:
    """Return the address that this machine has for a host; "" where that is this machine's loopback, or no route leads there."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # a UDP socket only chooses a route and an address
                address = str(probe.getsockname()[0]).partition("%")[0]
                return "" if ipaddress.ip_address(address).is_loopback else address
    return ""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; None: no interface has it."""
    return next((name for name, own in _addresses() if str(own) == address), None)


def interfaces() -> dict[str, list[str]]:
    """Return this machine's interfaces and their addresses, without link-local ones of IPv6."""
    by_name: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in _addresses():
        if address.version == 4 or not address.is_link_local:
            by_name.setdefault(name, []).append(str(address))
    return by_name


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    with suppress(OSError):
        buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            filled = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(buffer), buffer.buffer_info()[0]))
        for name, packed in _IFREQ.iter_unpack(buffer.tobytes()[: struct.unpack("iP", filled)[0]]):
            label = name.partition(b"\0")[0].decode()
            yield label.partition(":")[0], ipaddress.IPv4Address(packed)  # eth0:1 is a label for a second address of eth0
    with suppress(OSError):
        for fields in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            yield fields[-1], ipaddress.IPv6Address(bytes.fromhex(fields[0]))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine ("": all of them), at a free port where `port` is 0."""
    is_ipv6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=WAITING, dualstack_ipv6=is_ipv6 and not host)


def plain_address(address: str) -> str:
    """Return an address as it is usually written: a socket for IPv4 and IPv6 has IPv4's as ::ffff:10.0.0.1."""
    return address.removeprefix("::ffff:")


def is_address(host: str) -> bool:
    """Tell whether a host is written as an address. What a name means differs between machines: to itself it may be 127.0.1.1."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
