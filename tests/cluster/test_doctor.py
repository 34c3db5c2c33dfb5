"""`ddp-train doctor` over three hosts: clean ones pass, and of many faults at once each is named with its host and with advice."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.machine import Running
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import SshHosts
from tests.conftest import FEW, Finished, Project

pytestmark = pytest.mark.cluster

PORT = 29400
WITHIN_S = 15
BUSY = 8  # times as long as on a machine of one's own: the hosts share its cores with other tests
MINE = """
from ddp_train.data.synthetic_images import SyntheticImages

class Data(SyntheticImages):
    def __init__(self, root, path, **others):
        super().__init__(**others)
"""
LATE = """
import time
_right = time.time
time.time = lambda: _right() + 60
"""  # libfaketime breaks the time.sleep of torch's agent
LIMITED = ("sh", "-c", 'ulimit -n 256; exec "$@"', "limited")


@pytest.fixture
def place(project: Project) -> Path:
    """Return a folder with a data set of its own, and an empty one for the run."""
    project.write("mine.py", MINE)
    project.write("data/images.bin", "0" * 5000)
    project.write("labels/train.bin", "1" * 100)
    project.write("other/mine.py", MINE + "# changed\n")
    project.write("other/images.bin", "0" * 2500 + "1" + "0" * 2499)
    project.write("late/sitecustomize.py", LATE)
    project.write("packages/torch-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (project.folder / "run").mkdir()
    return project.folder


def doctor(*words: str, within: tuple[str, ...] = ()) -> list[str]:
    """Return the command, the same on each host.

    Args:
        within: a command that runs it.
    """
    data = ["data._target_=mine.Data", "+data.root=data", "+data.path=labels/train.bin"]
    cluster = ["cluster=machines", "cluster.device=cpu", "cluster.processes_per_node=1", f"cluster.rendezvous_endpoint=node0:{PORT}"]
    program = [*within, sys.executable, "-m", "ddp_train", "doctor"]
    return [*program, *FEW, "model=mlp", "model.width=16", *data, *cluster, "hydra.run.dir=run", *words]


@contextmanager
def examined(commands: list[Running]) -> Iterator[list[Finished]]:
    """Give how each ended, and check that it took no longer than it may."""
    started = time.monotonic()
    yield [command.finish(timeout=BUSY * WITHIN_S) for command in commands]
    print(f"{time.monotonic() - started:.1f} s")  # -s shows it


@pytest.mark.cluster_long
def test_three_clean_hosts_pass(hosts: Callable[[int], Hosts], place: Path) -> None:
    three = hosts(3)
    words = [doctor("cluster.nodes=3", f"cluster.node_rank={host}") for host in range(3)]
    with examined([three.start(host, *words[host], cwd=place) for host in (1, 2, 0)]) as (one, two, first):
        assert [each.returncode for each in (first, one, two)] == [0, 0, 0], first.output + one.output + two.output
        assert "fit: nothing is wrong" in first.stdout
        for said in ("3 machines, 3 ranks", "all others", "exact", "eth0"):
            assert said in first.stdout
    assert list((place / "run").iterdir()) == []


@pytest.mark.cluster_long
def test_of_many_faults_each_is_named_with_its_host_and_with_advice(hosts: Callable[[int], Hosts], place: Path) -> None:
    three = hosts(3)
    for host, commands in {
        1: [
            f"mount -t tmpfs tmpfs {place}/labels",  # data that is missing there
            f"mount -t tmpfs tmpfs {place}/run",  # a folder that is not shared
        ],
        2: [
            f"mount --bind {place}/other/mine.py {place}/mine.py",  # other code
            f"mount --bind {place}/other/images.bin {place}/data/images.bin",  # other bytes, the same size
            f"mount --bind {place}/run {place}/run; mount -o remount,bind,ro {place}/run",  # a folder that cannot be written
            "mount -o remount,size=64m /dev/shm",
            "nft 'table inet fault { chain in { type filter hook input priority 0; tcp flags & (syn|ack) == syn drop; }; }'",
        ],
    }.items():
        for command in commands:
            three[host].must("sh", "-euc", command)
    odd = {0: {}, 1: {"GLOO_SOCKET_IFNAME": "eth9", "PYTHONPATH": str(place / "late")}, 2: {"PYTHONPATH": str(place / "packages")}}
    words = {
        0: doctor("cluster.nodes=3", "cluster.node_rank=0"),
        1: doctor("cluster.nodes=3", "cluster.node_rank=1", "optimizer.lr=0.5", within=LIMITED),
        2: doctor("cluster.nodes=3", "cluster.node_rank=2"),
    }
    with examined([three.start(host, *words[host], cwd=place, env=odd[host]) for host in (1, 2, 0)]) as (one, two, first):
        assert [each.returncode for each in (first, one, two)] == [78, 78, 78], first.output + one.output + two.output
    lines = first.stdout.splitlines()
    for host, what, advice in (
        ("node1", "optimizer.lr: 0.5 on node1, ", "the same command on each machine"),
        ("node1", "GLOO_SOCKET_IFNAME=eth9 names eth9, which does not exist", "GLOO_SOCKET_IFNAME=null"),
        ("node1", "data.path: is missing on node1", "the same files on each machine"),
        ("node1", "its clock is 60", "chronyd"),
        ("node1", "does not share", "every machine mounts"),
        ("node1", "a process may have 256 open files", "ulimit -n"),
        ("node2", "code: mine.py", "the same code on each machine"),
        ("node2", "data.root: images.bin has the same size but different content", "the same files on each machine"),
        ("node2", "version of torch: '9.9' on node2", "the same versions"),
        ("node2", "cannot write into run: Read-only file system", "hydra.run.dir=FOLDER"),
        ("node2", "/dev/shm has 64 MiB", "--shm-size"),
        ("node2", "cannot be reached at ", "open all TCP ports"),
    ):
        places = [number for number, line in enumerate(lines) if line.startswith(f"{host}: ") and what in line]
        assert len(places) == 1, f"{what}\n{first.output}"
        assert lines[places[0] + 1].startswith("  fix: ") and advice in lines[places[0] + 1]
    assert "12 problems:" in lines
    assert "problems" not in one.stdout.partition("\n")[2]  # the table is on the first host's terminal; the others say where
    assert "12 to fix; the terminal of node0 names them" in one.stdout


@pytest.mark.cluster_long
def test_slurms_machines_are_examined_in_a_short_job(slurm_hosts: Callable[..., Slurm], place: Path) -> None:
    cluster = slurm_hosts(2)
    cluster.hosts[2].must("mount", "-o", "remount,size=64m", "/dev/shm")
    program = [sys.executable, "-m", "ddp_train", "doctor", *FEW, "model=mlp", "model.width=16"]
    words = ["cluster=slurm", "cluster.device=cpu", "cluster.nodes=2", "cluster.processes_per_node=1"]
    started = time.monotonic()
    done = cluster.run(*program, *words, cwd=place, timeout=BUSY * WITHIN_S)
    print(f"{time.monotonic() - started:.1f} s")
    assert done.returncode == 78, done.output
    assert "2 machines, 2 ranks" in done.stdout and "1 problem:" in done.stdout
    assert "node2: /dev/shm has 64 MiB" in done.stdout
    assert [path for path in (place / "outputs").rglob("*") if not path.is_dir()] == []
    assert "Requeue=0" in cluster.must("scontrol", "-o", "show", "job", "1")

    inside = cluster.run("salloc", "--nodes=2", *program, *words, cwd=place, timeout=BUSY * WITHIN_S)
    assert inside.returncode == 78, inside.output
    assert "node2: /dev/shm has 64 MiB" in inside.stdout


@pytest.mark.cluster_long
def test_machines_that_ssh_reaches_are_examined(ssh_hosts: Callable[[int], SshHosts], place: Path) -> None:
    three = ssh_hosts(3)
    three[2].must("mount", "-o", "remount,size=64m", "/dev/shm")
    program = [sys.executable, "-m", "ddp_train", "doctor", *FEW, "model=mlp", "model.width=16"]
    words = ["cluster=ssh", "cluster.device=cpu", "cluster.hosts=[node1,node2:2]", "cluster.processes_per_node=1"]
    done = three.run(0, *program, *words, cwd=place, timeout=BUSY * WITHIN_S)
    assert done.returncode == 78, done.output
    assert "2 machines, 3 ranks" in done.stdout
    assert done.stdout.count("node2: /dev/shm has 64 MiB") == 1
    assert [path for path in (place / "outputs").rglob("*") if not path.is_dir()] == []
