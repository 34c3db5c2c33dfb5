"""Real SLURM clusters on this one machine.

slurmctld runs on host 0, where users log in: `start` and `run` start their commands there. Nobody else can reach a cluster, whose network
is its own; so it needs no passwords.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.machine import Running, need, need_root, until
from tests.conftest import Finished

# Chosen so that waiting is short: what takes SLURM minutes by default takes it seconds here.
_CONF = """
ClusterName=bed
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# Nodes may say that they have more processors than this machine. Processes are not put into cgroups.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2
# A requeued job waits for cred_expire and a second.
AuthInfo=cred_expire=5
# `scontrol show job` stands in for sacct, which needs a data base.
MinJobAge=3600
KillWait=5
# A node that says nothing is down after about 30 seconds. One that was set down by hand stays so.
SlurmdTimeout=10
ReturnToService=1
MessageTimeout=20
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
{conf}
"""


class Slurm:
    """A cluster of nodes `node1`, `node2`, ... with one partition, `main`. A node has four processors and 4000 MB."""

    def __init__(self, folder: Path, nodes: int, *, is_shared: bool = False, gpus: int = 0, conf: str = "") -> None:
        """Start it.

        Args:
            is_shared: all nodes are host 0, which is quicker. They cannot be told apart by name or address; else node 1 is host 1.
            gpus: of each node. They are good for counting, and for CUDA_VISIBLE_DEVICES.
            conf: more lines for slurm.conf.
        """
        need_root()
        need("slurmctld", "slurmd")
        self.folder, self._is_shared = folder, is_shared
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        """What a command needs to find it; `start` sets it."""
        for gpu in range(gpus):  # SLURM wants device files with a number at the end: these are copies of /dev/null
            os.mknod(folder / f"gpu{gpu}", 0o20666, os.makedev(1, 3))
        has = f"CPUs=4 RealMemory=4000 State=UNKNOWN{f' Gres=gpu:{gpus}' if gpus else ''}"
        where = f" NodeHostname=node0 NodeAddr=node0 Port=[17001-{17000 + nodes}]" if is_shared else ""
        conf += "\nGresTypes=gpu" if gpus else ""
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes=f"NodeName=node[1-{nodes}]{where} {has}", conf=conf))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # 22.05 knows no `disabled`; this loads everywhere, and is not used
        (folder / "ctld").mkdir()
        self.hosts = Hosts(folder, 1 if is_shared else nodes + 1)
        try:
            self.must("slurmctld")
            for node in range(1, nodes + 1):
                (folder / f"spool.node{node}").mkdir()  # the socket of a daemon lies in it
                self.serve(node)
            until(lambda: self._idle() == nodes, f"{nodes} idle nodes; the daemons' logs are in {folder}", within_s=40)
        except BaseException:
            self.end()
            raise

    def serve(self, node: int) -> None:
        """Start the daemon of a node; `hosts.boot` turns a host on without it."""
        done = self.hosts.run(0 if self._is_shared else node, "slurmd", "-N", f"node{node}", env=self.environment)
        assert done.returncode == 0, done.output

    def end(self) -> None:
        """Kill the daemons and all jobs."""
        self.hosts.end()

    def start(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Running:
        """Start a command where users log in, and do not wait."""
        return self.hosts.start(0, *command, cwd=cwd, env={**self.environment, **(env or {})})

    def run(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120) -> Finished:
        """Run a command where users log in, to its end."""
        return self.start(*command, cwd=cwd, env=env).finish(timeout=timeout)

    def must(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command that has to succeed, and return what it printed."""
        done = self.run(*command, cwd=cwd)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.output}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what SLURM says of a job: JobState, Reason, ExitCode, Restarts, NodeList ..."""
        words = self.must("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, within_s: float = 90) -> dict[str, str]:
        """Wait until a job is in one of the states (COMPLETED, PENDING ...) and return what SLURM says of it."""
        said: dict[str, str] = {}

        def is_so() -> bool:
            said.update(self.job(job))
            return said["JobState"] in states

        try:
            until(is_so, f"job {job} is {' or '.join(states)}", within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {said['JobState']} ({said['Reason']})") from None
        return said

    def _idle(self) -> int:
        return self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.count(" idle\n")
