"""The network interfaces that gloo and NCCL are told to take, and whether this machine has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LOOPBACK = "lo"


def interface_problems(environment: Mapping[str, str], interfaces: Mapping[str, Sequence[str]], *, uses_gpu: bool) -> Iterator[str]:
    """Yield what is wrong with the interfaces that an environment names.

    Args:
        environment: as the ranks will have it.
        interfaces: those that the machine has, with their addresses.
        uses_gpu: NCCL's variable counts, too.
    """
    there = f"this machine has {', '.join(interfaces)}"
    for name in filter(None, environment.get(GLOO, "").split(",")):
        if name not in interfaces:
            yield f"{GLOO}={environment[GLOO]} names {name}, which is not there; {there}"
        elif not interfaces[name]:
            yield f"{GLOO}={environment[GLOO]} names {name}, which has no address"
    wanted = environment.get(NCCL, "")
    if uses_gpu and wanted and not taken_by_nccl(wanted, interfaces):
        yield f"{NCCL}={wanted} leaves no interface with an address; {there}"


def taken_by_nccl(wanted: str, interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the interfaces with an address that NCCL may take.

    Args:
        wanted: NCCL's own words: beginnings of names, `=` for whole names, `^` for all but these, `^=` for both. "": it chooses, and
            takes the loopback interface and docker's only where there is no other.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    usable = [name for name, addresses in interfaces.items() if addresses]
    if not wanted:
        return [name for name in usable if name != _LOOPBACK and not name.startswith("docker")] or usable
    is_not = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    is_exact = wanted.startswith("=")
    names = [name for name in wanted.removeprefix("=").split(",") if name]

    def matches(interface: str) -> bool:
        return interface in names if is_exact else interface.startswith(tuple(names))

    return [name for name in usable if matches(name) != is_not]
