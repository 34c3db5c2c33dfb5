"""Start a torchrun agent as a child process, pass signals on, and wait for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from ddp_train.errors import INTERRUPTED, TERMINATED
from ddp_train.launch.restart_note import STARTED
from ddp_train.launch.signals import stop_signals
from ddp_train.system import handover
from ddp_train.system.process import Child, fork


def run_agent(arguments: list[str], *, environment: Mapping[str, str]) -> int:
    """Run an agent to its end and return its exit code; 130 after Ctrl-C, 143 after another stop signal.

    A stop signal is passed on; a second Ctrl-C or SIGTERM kills the agent, and with it its ranks.

    Args:
        arguments: as for `agent.main.main`.
        environment: what the ranks' environment has beside this process's own.
    """
    agent = start_agent(arguments, environment=environment)
    with stop_signals(agent.signal, lambda: agent.signal(signal.SIGKILL)) as received:
        code = agent.wait()
    if received:
        return INTERRUPTED if signal.SIGINT in received else TERMINATED
    if code < 0:
        print(
            f"\nThe run failed: its agent (pid {agent.pid}) was ended by {signal.Signals(-code).name}; its ranks ended with it",
            file=sys.stderr,
        )
    return code if code >= 0 else 128 - code


def start_agent(arguments: list[str], *, environment: Mapping[str, str]) -> Child:
    """Start an agent. It is forked, not started anew (`prepare`); the ranks are started as fresh interpreters by the agent."""

    def be_agent() -> int:
        os.setsid()  # Ctrl-C on the terminal reaches the parent alone, which tells us once
        os.environ.update({**environment, handover.AGENT: str(os.getpid()), handover.STARTED: str(STARTED)})
        from ddp_train.launch.agent import main as agent  # imports torch: in this process only

        return agent.main(arguments)

    return fork(be_agent)


def prepare() -> None:
    """Import what agents need, torch first, once for all that are forked from this process: it takes each of them seconds else."""
    from ddp_train.launch.agent import main  # noqa: F401


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return what every rank's environment needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, len(os.sched_getaffinity(0)) // processes)
    return {"OMP_NUM_THREADS": str(threads)} if threads_per_process or "OMP_NUM_THREADS" not in os.environ else {}
