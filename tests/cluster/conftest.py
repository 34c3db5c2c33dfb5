"""Test beds: real engines on this one machine, which are gone after the test, however it ends.

`hosts(3)`        hosts of their own, on a switch whose cables can be pulled
`ssh_hosts(3)`    the same with OpenSSH between them
`slurm(3)`        SLURM with three nodes that share one host
`slurm_hosts(3)`  SLURM with three nodes, each on a host of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import SshHosts


@pytest.fixture
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Give what starts a bed in a folder of its own, and ends it after the test."""
    with ExitStack() as beds:

        def start(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            folder: Path = tmp_path_factory.mktemp("bed")  # its path is short, as those of sockets have to be
            started = kind(folder, *arguments, **options)
            beds.callback(started.end)
            return started

        yield start


@pytest.fixture
def hosts(bed: Callable[..., Any]) -> Callable[[int], Hosts]:
    """Boot that many hosts: `node0`, `node1` ..."""
    return lambda count: bed(Hosts, count)


@pytest.fixture
def ssh_hosts(bed: Callable[..., Any]) -> Callable[[int], SshHosts]:
    """Boot that many hosts that reach each other by SSH."""
    return lambda count: bed(SshHosts, count)


@pytest.fixture
def slurm(bed: Callable[..., Any]) -> Callable[..., Slurm]:
    """Start SLURM with that many nodes on one host; options: gpus=2, conf="more lines for slurm.conf"."""
    return lambda nodes, **options: bed(Slurm, nodes, is_shared=True, **options)


@pytest.fixture
def slurm_hosts(bed: Callable[..., Any]) -> Callable[..., Slurm]:
    """Start SLURM with that many nodes, each on a host of its own; the options are those of `slurm`."""
    return lambda nodes, **options: bed(Slurm, nodes, **options)
