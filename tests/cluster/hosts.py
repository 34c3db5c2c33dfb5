"""Hosts of their own on this one machine: network namespaces on a switch, whose cables can be pulled.

Each host has a name, an address, processes, /dev/shm and /run of its own; the file system is shared, as a cluster's is. The switch is a
bridge in a namespace of its own: no packet touches the machine's network, so that any number of beds run side by side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.machine import Machine, Running, need, until
from tests.conftest import Finished

_FAKETIME = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1")

_HOST = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
ip link set lo up
ip address add "$3/24" dev eth0
ip link set eth0 up
"""
_FILTER = """
table inet fault {{
  chain arrives {{ type filter hook input priority 0; iifname "eth0" {action}; }}
  chain leaves {{ type filter hook output priority 0; oifname "eth0" {action}; }}
}}
"""


class Hosts:
    """Hosts `node0`, `node1`, ... on a switch."""

    def __init__(self, folder: Path, count: int) -> None:
        need("ip", "nft")
        self.folder = folder
        self.names = [f"node{host}" for host in range(count)]
        self._table = folder / "hosts"
        self._table.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(host)} {name}\n" for host, name in enumerate(self.names)))
        self._switch = Machine(folder, unshare=("--net",))
        self._machines: dict[int, Machine] = {}
        try:
            self._switch.must("sh", "-euc", "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
            for host in range(count):
                self.boot(host)
        except BaseException:
            self.end()
            raise

    def __getitem__(self, host: int) -> Machine:
        """The machine of a host that is on."""
        return self._machines[host]

    def __len__(self) -> int:
        return len(self.names)

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{10 + host}"

    def start(self, host: int, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, clock_s: float = 0) -> Running:
        """Start a command on a host, and do not wait.

        Args:
            clock_s: how much later it is on the clock of this command and of all that it starts.
        """
        return self[host].start(*command, cwd=cwd, env={**(env or {}), **(clock(clock_s) if clock_s else {})})

    def run(
        self,
        host: int,
        *command: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        clock_s: float = 0,
        timeout: float = 120,
    ) -> Finished:
        """Run a command on a host to its end."""
        return self.start(host, *command, cwd=cwd, env=env, clock_s=clock_s).finish(timeout=timeout)

    def boot(self, host: int) -> None:
        """Turn a host on, with its cable in."""
        machine = Machine(self.folder, unshare=("--net", "--uts"), within=self._switch)
        self._machines[host] = machine
        # The other end of the cable, if the host was on before. Its hardware address stays the same: the others remember it for a while.
        self._switch.run("ip", "link", "del", f"port{host}")
        mac = f"02:00:0a:4d:00:{10 + host:02x}"
        plug = 'ip link add "$1" type veth peer name eth0 address "$3" netns "$2"; ip link set "$1" master br0 up'
        self._switch.in_its_network("sh", "-euc", plug, "plug", f"port{host}", str(machine.pid), mac)
        machine.must("sh", "-euc", _HOST, "host", self.names[host], str(self._table), self.address(host))

    def power_off(self, host: int) -> None:
        """Cut a host's power: the others hear nothing more of it."""
        self.unplug(host)
        self.kill(host)

    def kill(self, host: int) -> None:
        """Kill all processes of a host. Its kernel tells the others that their connections are closed."""
        self._machines.pop(host).end()

    def unplug(self, host: int) -> None:
        """Pull a host's cable at the switch."""
        self._switch.must("ip", "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Put it in again."""
        self._switch.must("ip", "link", "set", f"port{host}", "up")

    def move_away(self, host: int, delay_s: float) -> None:
        """Give a host's cable a delay, each way."""
        near, far, own = f"near{host}", f"far{host}", f"cable{host}"
        relay = self._switch.start(sys.executable, "-m", "tests.cluster.far", far, near, str(delay_s), cwd=Path(__file__).parents[2])
        until(lambda: "ready" in relay.output, relay.output, within_s=30)
        longer = 'ip link add "$1" type bridge; for each in "$1" "$2" "$3"; do ip link set "$each" up; done; ip link set "$3" master br0'
        self._switch.must(
            "sh", "-euc", f'{longer}; ip link set "$2" master "$1"; ip link set "$4" master "$1"', "far", own, far, near, f"port{host}"
        )

    def drop(self, host: int) -> None:
        """Drop all packets of a host without a word; its interface stays up."""
        self._filter(host, "drop")

    def reject(self, host: int) -> None:
        """Answer all packets of a host as a firewall may: connection reset."""
        self._filter(host, "meta l4proto tcp reject with tcp reset")

    def pass_all(self, host: int) -> None:
        """Let the packets through again."""
        self[host].must("nft", "delete", "table", "inet", "fault")

    def processes(self, host: int) -> list[str]:
        """Return the command lines of what runs on a host."""
        return self._machines[host].processes() if host in self._machines else []

    def end(self) -> None:
        """Turn everything off."""
        for machine in (*self._machines.values(), self._switch):
            machine.end()
        self._machines.clear()

    def _filter(self, host: int, action: str) -> None:
        self[host].must("nft", _FILTER.format(action=action))


def clock(offset_s: float) -> dict[str, str]:
    """Return the environment of processes whose clock is that much later; the clock that counts durations is as it was."""
    need("faketime")
    library = next((path for path in _FAKETIME if os.path.exists(path)), None)
    if library is None:
        pytest.skip(f"needs libfaketime at one of {', '.join(_FAKETIME)}")
    # Files keep the times that the file server gives them, as on a real network file system.
    return {"LD_PRELOAD": library, "FAKETIME": f"{offset_s:+}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
