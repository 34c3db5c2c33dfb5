"""This machine: one agent for each job, and one process per GPU, or two on CPU."""

import signal
import time
from dataclasses import dataclass, field

from ddp_train.config.cluster import ALONE, environment_of, max_restarts, processes_of_nodes, rank_environment
from ddp_train.errors import INTERRUPTED, shell_code
from ddp_train.launch.fork_requests import AgentOptions, start_agent, start_agent_and_wait
from ddp_train.launch.job import Job
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import code_of_stop, exit_code_after_agent
from ddp_train.system import devices, process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import Child

_POLL_S = 0.005


def run_on_this_machine(job: Job) -> int:
    """Run a job on this machine to its end and return its exit code.

    The agent finds a free port itself: any number of runs share a machine.
    """
    before, uses_compiler = job.run_folder.read_result(), job.config.uses_compiler
    code = start_agent_and_wait(_options(job), arguments_for(job), environment=_environment(job), uses_compiler=uses_compiler)
    return exit_code_after_agent(job.run_folder, code, before=before) if job.is_resumable else code


@dataclass(kw_only=True)
class _RunningJob:
    run_folder: RunFolder
    agent: Child
    started: float = field(default_factory=time.monotonic)
    signals: set[int] = field(default_factory=set)  # that the agent was sent


class LocalSlot:
    """A slot of a sweep on this machine: each job has an agent and ranks of its own, which are forked.

    `number`: its place, from 0, among so many slots that share this machine.
    """

    def __init__(self, number: int, slots: int) -> None:
        self._number, self._slots = number, slots
        self._running: _RunningJob | None = None

    def start(self, job: Job) -> None:
        environment = _environment(job, slots=self._slots)
        if self._slots > 1 and devices.resolve_device(job.config.cluster.device) == "cuda":
            first = self._number * (len(gpus := devices.gpus()) // self._slots)  # each slot has as many
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + processes_of_nodes(job.config.cluster)[0]])
        agent = start_agent(_options(job), arguments_for(job), environment=environment)
        self._running = _RunningJob(run_folder=job.run_folder, agent=agent)

    def poll(self, timeout_s: float) -> int | None:
        """Return the exit code of the job, or None while it runs; record as its failure that its agent was killed."""
        running = self._running
        assert running is not None
        agent, run_folder = running.agent, running.run_folder
        if not wait_until(lambda: agent.exit_code() is not None, within_s=timeout_s, every_s=_POLL_S):
            return None
        self._running, code = None, agent.wait()
        if (stopped := code_of_stop(run_folder, in_sweep=True)) is not None:
            return stopped
        if -code in running.signals:  # killed by us, or stopped before it could pass the signal on
            return INTERRUPTED
        if code < 0 and not run_folder.is_completed():
            killed = failure.from_agent(pid=agent.pid, signal_name=signal.Signals(-code).name)
            killed.record(run_folder, seconds=time.monotonic() - running.started)
        return shell_code(code)

    def stop(self, number: int) -> None:
        if self._running is not None:
            self._running.signals.add(number)
            self._running.agent.signal(number)

    def end(self) -> None:
        """Kill what still runs."""
        if self._running is not None:
            self._running.agent.signal(signal.SIGKILL)
            self._running.agent.wait()
            self._running = None


def arguments_for(job: Job) -> list[str]:
    """Return torchrun's arguments for the agent that runs a job on this machine."""
    cluster = job.config.cluster
    restarts = max_restarts(cluster, {}) if job.is_resumable and not job.in_sweep else 0  # a sweep starts its jobs again itself
    return [*ALONE, f"--nproc-per-node={processes_of_nodes(cluster)[0]}", f"--max-restarts={restarts}", "-m", "ddp_train"]


def _options(job: Job) -> AgentOptions:
    cluster, run_folder = job.config.cluster, job.run_folder if job.is_resumable else None
    uses_torch_agent = cluster.agent == "torch"
    return AgentOptions(grace_s=cluster.grace_s, run_folder=run_folder, in_sweep=job.in_sweep, uses_torch_agent=uses_torch_agent)


def _environment(job: Job, *, slots: int = 1) -> dict[str, str]:
    """Return the variables that a job's ranks get in addition to this process's, where so many slots share this machine."""
    cluster = job.config.cluster
    environment = rank_environment(processes_of_nodes(cluster)[0] * slots, cluster.threads_per_process)
    return {**environment, **environment_of(cluster.env), process_env.JOB: job.to_json()}
