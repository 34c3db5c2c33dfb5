"""The launcher's end of a group of members that runs one job after another on this machine.

    this process --(Unix socket)--> member of rank 0 --(rendezvous store)--> members of the other ranks --(pipes)--> the ranks themselves

The agent starts one member per rank (`ddp_train/rank/sweep_member.py`). Members outlive the ranks, which are forked for each job.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from ddp_train.config.cluster import environment_of
from ddp_train.config.schema import ClusterConfig
from ddp_train.errors import FAILED, INTERRUPTED
from ddp_train.launch.agent_process import AgentOptions, agent_arguments, rank_environment, start_agent
from ddp_train.launch.job import Job
from ddp_train.run_folder import failure
from ddp_train.system import devices, process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import Child, is_alive

_ENDS_WITHIN_S = 10.0
_MAX_CHARACTERS = 60  # of the folder for temporary files: the path of a Unix socket may have 107


class WarmSlot:
    """A slot whose group serves all jobs with as many processes, on the same devices, in the same environment.

    `number`: its place, from 0, among the `slots` that share this machine.
    """

    _agent: Child  # set where there is a group

    def __init__(self, agent_log: Path, *, number: int = 0, slots: int = 1) -> None:
        self._agent_log, self._number, self._slots = agent_log, number, slots
        self._serves: tuple[int, dict[str, str]] | None = None  # how many processes, in which environment; None: there is no group
        self._is_ending = False  # the agent has told its members to end
        self._connection: socket.socket | None = None

    def start(self, job: Job) -> None:
        """Begin a job, in the present group or in a new one."""
        cluster = job.config.cluster
        processes = devices.processes_per_node(cluster.processes_per_node, cluster.device)
        environment = rank_environment(processes * self._slots, cluster.threads_per_process)
        environment |= environment_of(cluster.env)
        if self._slots > 1 and devices.resolve_device(cluster.device) == "cuda":
            first = self._number * (len(gpus := devices.gpus()) // self._slots)  # each slot has as many
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + processes])
        if self._serves != (processes, environment) or self._is_ending or self._agent.exit_code() is not None:
            self.end()
            self._open(cluster, processes, environment)
        self._job, self._sent = job, time.monotonic()
        (self._folder / "run_folder").write_text(str(job.run_folder.root))
        self._unsent = f"{job.to_json()}\n".encode()
        self._flush()

    def poll(self, timeout_s: float) -> int | None:
        readable, _, _ = select.select([self._connection or self._listener], [], [], timeout_s)
        if readable and self._connection is None:
            self._connection, _ = self._listener.accept()
            self._flush()
        elif readable and self._connection is not None:
            line = ""
            with contextlib.suppress(ConnectionError), self._connection.makefile() as answers:  # killed before it had read the whole job
                line = answers.readline()  # one line for each job, sent at once
            if not line.endswith("\n"):  # cut off, or empty
                return self._on_lost_group()
            answer = json.loads(line)
            self._is_ending = answer["is_last"]
            if self._is_ending and answer["exit_code"] == FAILED:
                self._wait()  # for the agent, which says what happened
            return int(answer["exit_code"])
        elif self._agent.exit_code() is not None:
            return self._on_lost_group()
        return None

    def stop(self, number: int) -> None:
        if self._serves is not None:
            self._stop_signals.add(number)
            self._agent.signal(number)

    def end(self) -> None:
        """End the members by closing the connection; kill those that do not end."""
        if self._serves is None:
            return
        self._serves = None
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # close alone would not do: forked processes have a copy
            self._connection.close()
        else:
            self._agent.signal(signal.SIGKILL)  # its members have not connected yet
        self._listener.close()
        self._wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, cluster: ClusterConfig, processes: int, environment: dict[str, str]) -> None:
        """Start an agent with its members, and listen for the member of rank 0."""
        self._folder = _make_folder()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen()
        self._connection, self._is_ending = None, False
        self._stop_signals = set[int]()  # sent to the agent
        options = AgentOptions(grace_s=cluster.grace_s, group=self._folder, log=self._agent_log, uses_torch_agent=cluster.agent == "torch")
        arguments = agent_arguments(processes, f"--log-dir={self._folder}/torch")
        self._agent = start_agent(options, arguments, environment={**environment, process_env.GROUP: str(self._folder)})
        self._serves = processes, environment

    def _flush(self) -> None:
        if self._connection is not None and self._unsent:
            try:
                self._connection.sendall(self._unsent)
            except OSError:  # the member is gone; the next poll reports it
                return
            self._unsent = b""

    def _wait(self) -> int:
        if not wait_until(lambda: self._agent.exit_code() is not None, within_s=_ENDS_WITHIN_S, every_s=0.01):
            self._agent.signal(signal.SIGKILL)
        return self._agent.wait()

    def _on_lost_group(self) -> int:
        """Return the exit code of a job whose group has ended; where the agent was killed, record that as the failure."""
        code = self._wait()
        if -code in self._stop_signals:  # killed by us, or stopped before it could pass the signal on
            return INTERRUPTED
        if code < 0 and not self._job.run_folder.is_completed():
            killed = failure.from_agent(pid=self._agent.pid, signal_name=signal.Signals(-code).name)
            killed.record(self._job.run_folder, seconds=time.monotonic() - self._sent)
        return FAILED if code == 0 else code if code > 0 else 128 - code


def _make_folder() -> Path:
    """Return a new folder that this user alone can read, after removing those of launchers that were killed."""
    temporary = Path(tempfile.gettempdir())
    if len(str(temporary)) > _MAX_CHARACTERS:
        temporary = Path("/tmp")
    for folder in temporary.glob("ddp_train_group_*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and not is_alive(int(folder.name.split("_")[3])):
                shutil.rmtree(folder)
    return Path(tempfile.mkdtemp(prefix=f"ddp_train_group_{os.getpid()}_", dir=temporary))


def slots(agent_logs: Path, count: int) -> list[WarmSlot]:
    """Return the slots of this machine; no process is started yet."""
    return [WarmSlot(agent_logs / f"agent_{number:05d}.log", number=number, slots=count) for number in range(count)]
