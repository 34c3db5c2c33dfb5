"""The beds themselves: what the other tests here stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.machine import until
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import SshHosts
from tests.conftest import our_processes, wait_for

pytestmark = pytest.mark.cluster

ANSWER = """
import socket, sys
with socket.create_server(("", 4000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(100))
    connection.recv(1)
"""
ASK = """
import socket, sys
with socket.create_connection(("node0", 4000), timeout=2) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode(), socket.gethostname(), connection.getsockname()[0])
"""


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def test_hosts_have_names_and_addresses_and_reach_each_other(hosts: Callable[[int], Hosts]) -> None:
    two = hosts(2)
    server = two.start(0, *python(ANSWER))
    wait_for(lambda: "listening" in server.output)
    assert two.run(1, *python(ASK)).stdout == f"hello node1 {two.address(1)}\n"
    assert server.finish().returncode == 0
    assert two.run(1, "sh", "-c", "touch /dev/shm/mine; exit 7").returncode == 7
    assert two.run(0, "ls", "/dev/shm").stdout == ""


@pytest.mark.parametrize(
    ("cut", "mend", "error"), [("unplug", "plug", "timed out"), ("drop", "pass_all", "timed out"), ("reject", "pass_all", "refused")]
)
def test_a_host_is_cut_off_and_comes_back(hosts: Callable[[int], Hosts], cut: str, mend: str, error: str) -> None:
    two = hosts(2)
    server = two.start(0, *python(ANSWER))
    wait_for(lambda: "listening" in server.output)
    getattr(two, cut)(1)
    assert error in two.run(1, *python(ASK)).output
    getattr(two, mend)(1)
    until(lambda: two.run(1, *python(ASK)).stdout.startswith("hello"), "an answer")


def test_a_host_without_power_is_silent_and_boots_again(hosts: Callable[[int], Hosts]) -> None:
    two = hosts(2)
    sleeper = two.start(0, "sleep", "1000")
    wait_for(lambda: two.processes(0) == ["sleep 1000"])
    two.power_off(0)
    assert sleeper.finish(timeout=5).returncode != 0
    assert two.processes(0) == []
    assert "timed out" in two.run(1, *python(ASK)).output
    two.boot(0)
    server = two.start(0, *python(ANSWER))
    wait_for(lambda: "listening" in server.output)
    until(lambda: two.run(1, *python(ASK)).stdout.startswith("hello"), "an answer")


def test_a_signal_reaches_the_program_on_a_host(hosts: Callable[[int], Hosts]) -> None:
    one = hosts(1)
    trap = one.start(0, "bash", "-c", "trap 'exit 5' USR1; echo ready; while :; do sleep 0.1; done")
    wait_for(lambda: "ready" in trap.output)
    trap.signal(signal.SIGUSR1)
    assert trap.finish(timeout=5).returncode == 5


def test_a_clock_is_another_for_one_command_alone(hosts: Callable[[int], Hosts]) -> None:
    one = hosts(1)
    tell = python("import time; print(time.time(), time.monotonic())")
    (late, late_count), (right, count) = (map(float, one.run(0, *tell, clock_s=clock_s).stdout.split()) for clock_s in (60, 0))
    assert 55 < late - right < 61
    assert 0 < count - late_count < 5


def test_commands_by_ssh_end_with_their_exit_code(ssh_hosts: Callable[[int], SshHosts]) -> None:
    two = ssh_hosts(2)
    done = two.run(0, "ssh", "-o", "BatchMode=yes", "node1", "hostname; exit 7")
    assert (done.returncode, done.stdout) == (7, "node1\n"), done.output


def test_slurm_runs_a_step_and_a_batch_job(slurm: Callable[..., Slurm], tmp_path: Path) -> None:
    cluster = slurm(3, gpus=2)
    assert sorted(cluster.must("srun", "-N3", "printenv", "SLURMD_NODENAME").splitlines()) == ["node1", "node2", "node3"]
    job = cluster.must("sbatch", "--parsable", "--gpus-per-node=1", "--wrap=printenv CUDA_VISIBLE_DEVICES; exit 3", cwd=tmp_path)
    said = cluster.wait_for(job, "COMPLETED", "FAILED")
    assert (said["JobState"], said["ExitCode"]) == ("FAILED", "3:0")
    assert (tmp_path / f"slurm-{job}.out").read_text() == "0\n"


def test_slurm_on_hosts_gives_names_that_resolve(slurm_hosts: Callable[..., Slurm]) -> None:
    cluster = slurm_hosts(2)
    done = cluster.must("srun", "-N2", "sh", "-c", "hostname; getent hosts $(scontrol show hostnames | head -n1)")
    assert sorted(done.splitlines()) == sorted(["node1", "node2", *2 * [f"{cluster.hosts.address(1)}      node1"]])


KILLED = """
import sys, time
from pathlib import Path
from tests.cluster.hosts import Hosts
from tests.cluster.machine import until
one = Hosts(Path(sys.argv[1]), 1)
one.start(0, "sh", "-c", "setsid sleep 1000 & sleep 1000")  # a daemon, too
until(lambda: one.processes(0).count("sleep 1000") == 2, "both")
print("up", flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_a_bed_whose_test_was_killed(tmp_path_factory: pytest.TempPathFactory, bed: Callable[..., object]) -> None:
    folder = tmp_path_factory.mktemp("bed")
    bed(Hosts, 1)  # installs what is needed, or skips
    test = subprocess.Popen([*python(KILLED), str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert test.stdout is not None and test.stdout.readline() == "up\n"
    assert our_processes(folder)
    os.kill(test.pid, signal.SIGKILL)
    test.communicate()
    deadline = time.monotonic() + 5
    while our_processes(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert our_processes(folder) == []
