"""The launcher's end of a group of members that runs one job after another on this machine.

    this process --(Unix socket)--> member of rank 0 --(rendezvous store)--> members of the other ranks --(pipes)--> the ranks themselves

The agent starts one member per rank (`ddp_train/rank/sweep_member.py`); members outlive the ranks, which
are forked from them for each job.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_train.config.cluster import ALONE, environment_of
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import FAILED, INTERRUPTED
from ddp_train.job import Job
from ddp_train.launch.agent_process import rank_environment, start_agent
from ddp_train.run_folder import failure
from ddp_train.system import devices, handover
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import is_alive

_ENDS_WITHIN_S = 10.0
_LONGEST = 60


class WarmSlot:
    """A slot whose group stays as long as its jobs fit: as many processes, on the same devices, in the same environment.

    Args:
        agent_log: where torch's agent complains.
        number: which of the slots that share this machine it is, from 0.
        slots: how many they are.
    """

    def __init__(self, agent_log: Path, *, number: int = 0, slots: int = 1) -> None:
        self._agent_log, self._number, self._slots = agent_log, number, slots
        self._group: _Group | None = None

    def start(self, job: Job) -> None:
        """Begin a job, in the group that is there or in a new one."""
        cluster = job.config.cluster
        processes = devices.processes_per_node(cluster.processes_per_node, cluster.device)
        environment = rank_environment(processes * self._slots, cluster.threads_per_process)
        environment |= environment_of(cluster.env)
        if self._slots > 1 and devices.resolve_device(cluster.device) == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices.gpu_share(self._number, self._slots)[:processes])
        if self._group is None or not self._group.can_serve(processes, environment):
            self.end()
            self._group = _Group(self._agent_log, processes, environment, cluster)
        self._group.send(job)

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the job, or None when it runs still."""
        assert self._group is not None
        return self._group.poll(timeout_s)

    def stop(self, number: int) -> None:
        """Pass a stop signal on."""
        if self._group is not None:
            self._group.stop(number)

    def end(self) -> None:
        """End the processes when they are idle, or at once."""
        if self._group is not None:
            self._group.close()
            self._group = None


class _Group:
    """An agent with its members, and the socket to the member of rank 0."""

    def __init__(self, agent_log: Path, processes: int, environment: Mapping[str, str], cluster: ClusterConfig) -> None:
        self._processes, self._environment = processes, environment
        self._folder = _make_folder()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._unsent = b""
        self._job: Job | None = None
        self._sent = 0.0
        self._told: set[int] = set()  # to end, by which signals
        self._is_ending = False  # the agent has told its members to end
        self.agent = start_agent(
            [
                f"--grace-s={cluster.grace_s}",
                f"--agent={cluster.agent}",
                f"--log={agent_log}",
                f"--group={self._folder}",
                *ALONE,
                f"--log-dir={self._folder}/torch",
                f"--nproc-per-node={processes}",
                "-m",
                "ddp_train",
            ],
            environment={**environment, handover.GROUP: str(self._folder)},
        )

    def can_serve(self, processes: int, environment: Mapping[str, str]) -> bool:
        is_the_same = (processes, environment) == (self._processes, self._environment)
        return is_the_same and not self._is_ending and self.agent.exit_code() is None

    def send(self, job: Job) -> None:
        self._job, self._sent = job, time.monotonic()
        (self._folder / "run_folder").write_text(str(job.run_folder.root))
        self._unsent = f"{job.to_json()}\n".encode()
        self._flush()

    def poll(self, timeout_s: float) -> int | None:
        waiting_for = self._connection or self._listener
        readable, _, _ = select.select([waiting_for], [], [], timeout_s)
        if readable and self._connection is None:
            self._connection, _ = self._listener.accept()
            self._flush()
        elif readable and self._connection is not None:
            line = ""
            with contextlib.suppress(ConnectionError), self._connection.makefile() as answers:  # killed before it had read all that we sent
                line = answers.readline()  # one for each job, sent at once: nothing more is to be waited for, and nothing is left
            if not line.endswith("\n"):  # cut, or none
                return self._lost()
            answer = json.loads(line)
            self._is_ending = answer["is_last"]
            if self._is_ending and answer["exit_code"] == FAILED:
                self._wait()  # for the agent, which says what happened
            return int(answer["exit_code"])
        elif self.agent.exit_code() is not None:
            return self._lost()
        return None

    def stop(self, number: int) -> None:
        self._told.add(number)
        self.agent.signal(number)

    def close(self) -> None:
        """End the members by ending the connection; kill what does not end."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # close alone would not do: what was forked meanwhile has a copy
            self._connection.close()
        else:
            self.agent.signal(signal.SIGKILL)  # its members have not come to the socket yet
        self._listener.close()
        self._wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        if self._connection is not None and self._unsent:
            try:
                self._connection.sendall(self._unsent)
            except OSError:  # the member is gone; the next poll says so
                return
            self._unsent = b""

    def _wait(self) -> int:
        """Wait for the agent, no longer than it may take, and return its exit code."""
        if not wait_until(lambda: self.agent.exit_code() is not None, within_s=_ENDS_WITHIN_S, every_s=0.01):
            self.agent.signal(signal.SIGKILL)
        return self.agent.wait()

    def _lost(self) -> int:
        """The group ended while it had a job: its agent says why, unless it is the one that was killed."""
        code = self._wait()
        assert self._job is not None
        if -code in self._told:  # killed by us, or stopped before it could pass the signal on
            return INTERRUPTED
        if code < 0 and not self._job.run_folder.is_completed():
            found = failure.from_agent(pid=self.agent.pid, signal_name=signal.Signals(-code).name)
            found.record(self._job.run_folder, seconds=time.monotonic() - self._sent)
        return FAILED if code == 0 else code if code > 0 else 128 - code


def _make_folder() -> Path:
    """Return a new folder that this user alone can read, after removing those of launchers that were killed."""
    temporary = Path(tempfile.gettempdir())
    if len(str(temporary)) > _LONGEST:  # the path of a Unix socket may have 107 characters
        temporary = Path("/tmp")
    for left in temporary.glob("ddp_train_group_*"):
        with contextlib.suppress(OSError, ValueError):
            if left.stat().st_uid == os.getuid() and not is_alive(int(left.name.split("_")[3])):
                shutil.rmtree(left)
    return Path(tempfile.mkdtemp(prefix=f"ddp_train_group_{os.getpid()}_", dir=temporary))


def slots(agent_logs: Path, count: int) -> list[WarmSlot]:
    """Return the slots of this machine; no process is started yet."""
    return [WarmSlot(agent_logs / f"agent_{number:05d}.log", number=number, slots=count) for number in range(count)]
