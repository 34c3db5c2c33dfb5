"""This machine's agent for one attempt: torchrun's, in a child of the node program, with a stop and a kill that it cannot miss."""

import asyncio
import os
import signal
import socket
import sys
import time

from ddp_train.config.cluster import REGISTRY, environment_of, rank_environment
from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, shell_code
from ddp_train.launch.fork_requests import AgentOptions, start_agent
from ddp_train.launch.job import Job
from ddp_train.launch.node.this_node import ThisNode
from ddp_train.launch.node.wire import Ended, Line, NewAttempt, reason
from ddp_train.launch.restart_note import recall_run, remember_run
from ddp_train.run_folder import failure
from ddp_train.run_folder.result import Result
from ddp_train.system import process_env
from ddp_train.system.network import plain_address
from ddp_train.system.process import STOP_SIGNALS, Child, descendants, is_alive

SHOWN = 200  # characters of an error in a line
_STORE_S = 10.0
_DIES_WITHIN_S = 5.0
_GIVES_UP_S = 15.0  # an agent that was killed; more than what is waited for its ranks
_POLL_S = 0.05


class AttemptAgent:
    """One attempt on this machine, from the registry's message of it to the end of the agent.

    `listener`: where the agent is to serve the store of the attempt (the first machine).
    """

    def __init__(self, this_node: ThisNode, attempt: NewAttempt, line: Line, *, listener: socket.socket | None) -> None:
        self._this_node, self.attempt, self._line, self._listener = this_node, attempt, line, listener
        self._job = None if attempt.job is None else Job.from_json(attempt.job)
        self.folder = self._job.run_folder if self._job is not None and self._job.is_resumable else None
        self.stop_signal: int | None = None  # the first one; the agent may not have begun yet
        self._is_killed = False
        self.before: Result | None = None  # what result.json held when the attempt began
        self._agent: Child | None = None
        self._remains: list[int] = []  # the processes below an agent that was killed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the agent, in a task of the event loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def is_at_work(self) -> bool:
        return self._task is not None and not self._task.done()

    def send_signal(self, number: int) -> None:
        """Tell the agent to stop; one that has yet to begin does not begin."""
        self.stop_signal = self.stop_signal or number
        if self._agent is not None:
            self._agent.signal(number)

    def kill(self) -> None:
        """Kill the agent, and its ranks end with it; one that has yet to begin does not begin."""
        self._is_killed = True
        if self._agent is not None:
            self._remains = [*self._remains, *descendants(self._agent.pid)]
            self._agent.signal(signal.SIGKILL)

    async def end(self) -> bool:
        """Kill the agent and wait for its end; tell whether it has come."""
        task, self._task = self._task, None
        if task is None:
            return True
        self.kill()
        await asyncio.wait({task}, timeout=_GIVES_UP_S)
        if not task.done():
            print("the agent of this machine was killed, but the kernel does not end it", file=sys.stderr, flush=True)
        return task.done()

    async def _run(self) -> None:
        try:
            code, why = await self._end_of_agent()
        except Exception as error:  # no process more is to be had, say: the other machines wait for a word
            self.kill()
            self._agent = None
            report = failure.from_exception(error, rank=0, step=None)
            code, why = FAILED, f"its agent could not run: {report.line(SHOWN)}"
            self._record(report)
        finally:
            if self._listener is not None:
                self._listener.close()
        self._line.send("ended", **Ended(self.attempt.number, code, why)._asdict())

    async def _end_of_agent(self) -> tuple[int, str]:
        """Run the agent; return the code of its end, and why where the other machines have to be told."""
        self.before = None if self.folder is None else self.folder.read_result()
        host = self._host()
        problem = await _unreachable_store(host, self.attempt.port) if self._listener is None else None
        if last_signal := signal.SIGKILL if self._is_killed else self.stop_signal:  # the agent is not to begin
            return shell_code(-last_signal), ""
        if problem:
            return ENVIRONMENT_REFUSES, problem
        if self.attempt.number > 1 and self._job is not None and recall_run(owner=os.getpid()) is None:
            remember_run(self._job.continues_from, owner=os.getpid())  # no rank came so far as to write it
        files = [] if self._listener is None else [self._listener.fileno()]
        grace_s, attempt = self._this_node.cluster.grace_s, self.attempt
        options = AgentOptions(grace_s=grace_s, run_folder=self.folder, node_rank=attempt.rank, restarts=attempt.restarts)
        self._agent = agent = start_agent(options, self._arguments(host), environment=self._environment(), files=files)
        if self._listener is not None:
            self._listener.close()
        while (code := agent.exit_code()) is None:
            await asyncio.sleep(_POLL_S)
        deadline = time.monotonic() + _DIES_WITHIN_S
        while any(map(is_alive, self._remains)) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._agent = None
        why = ""
        if code < 0 and not self._is_killed and -code not in STOP_SIGNALS:
            report = failure.from_agent(pid=agent.pid, signal_name=signal.Signals(-code).name)
            why = report.message
            self._record(report)
        return shell_code(code), why

    def _record(self, report: failure.Failure) -> None:
        if self.folder is not None and not self.folder.has_ended_since(self.before):
            report.record(self.folder)

    def _host(self) -> str:
        """Return the address of the first machine, where the ranks meet."""
        if self._listener is None:
            return plain_address(self._line.connection.getpeername()[0])
        host = plain_address(self._listener.getsockname()[0])
        return "127.0.0.1" if host in ("0.0.0.0", "::") else host

    def _arguments(self, host: str) -> list[str]:
        return [
            f"--max-restarts={self.attempt.max_restarts}",
            f"--nnodes={self.attempt.nodes}",
            f"--nproc-per-node={self._this_node.facts.processes}",
            f"--rdzv-backend={REGISTRY}",
            f"--rdzv-id={self.attempt.name}",
            f"--rdzv-endpoint={f'[{host}]' if ':' in host else host}:{self.attempt.port}",
            f"--rdzv-conf=rank={self.attempt.rank},listener={-1 if self._listener is None else self._listener.fileno()}",
            "-m",
            "ddp_train",
            *(self._this_node.arguments if self.attempt.job is None else ()),
        ]

    def _environment(self) -> dict[str, str]:
        cluster = self._this_node.cluster
        environment = rank_environment(self._this_node.facts.processes, cluster.threads_per_process) | environment_of(cluster.env)
        environment[process_env.NODE] = str(os.getpid())
        if self._job is not None and self.attempt.job is not None:
            environment[process_env.JOB] = self.attempt.job
            if not self._job.is_resumable:
                environment[process_env.FACTS] = self._this_node.facts.to_json()
        return environment


async def _unreachable_store(host: str, port: int) -> str | None:
    """Return why the store of an attempt cannot be reached; None when it can."""
    try:
        async with asyncio.timeout(_STORE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return f"cannot reach {host}:{port}, where the ranks meet: {reason(error)}; open all ports between the machines"
    writer.close()
    return None
