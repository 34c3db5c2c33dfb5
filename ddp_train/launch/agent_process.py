"""Start a torchrun agent as a child process, pass signals on, and wait for it.

Agents come from a nursery: an interpreter that imports torch while this process composes and checks. It begins as soon as the command
can see that it will train (`expect_agents`), and is ended when it is not needed after all.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_train.errors import INTERRUPTED, TERMINATED
from ddp_train.launch.restart_note import STARTED
from ddp_train.launch.signals import stop_signals
from ddp_train.system import handover
from ddp_train.system.folder_lock import descriptors
from ddp_train.system.nursery import Nursery, interpreter, spawn_nursery
from ddp_train.system.process import Child
from ddp_train.system.threads import VARIABLE

TORCH, RANKS, COMPILER = "torch", "ddp_train.rank.forked", "torch._dynamo"
"""What a configuration's check needs; with that an agent and a rank; with that DDP, most of torch's optimizers and who compiles."""

IMPORTED = (TORCH, "ddp_train.launch.agent.main", "ddp_train.rank.main", RANKS, COMPILER)
"""What a nursery imports, in this order. The last takes half as long as all others together."""

_nursery: Nursery | None = None


def expect_agents() -> None:
    """Begin to import what an agent and its ranks need, beside this process."""
    global _nursery
    if _nursery is not None and not _nursery.is_there():  # it was killed
        expect_none()
    if _nursery is None:
        environment = {**os.environ, VARIABLE: "1"}  # so that it can be forked: OpenBLAS starts its threads when it is loaded
        environment.pop(handover.CALLER, None)  # it is ours
        _nursery = spawn_nursery(interpreter(), environment)


def ask_early(request: Mapping[str, Any], *, files: Sequence[int]) -> Child | None:
    """Let a process do something that has imported torch, before it becomes an agent; None: none is expected."""
    if _nursery is None or not _nursery.is_there():
        return None
    return _nursery.start(request, files=files, needs=TORCH)


def expect_none() -> None:
    """End what imports or waits: no agent is needed, or not for a long time."""
    global _nursery
    nursery, _nursery = _nursery, None
    if nursery is not None:
        nursery.end()


def run_agent(arguments: list[str], *, environment: Mapping[str, str], needs: str = COMPILER) -> int:
    """Run an agent to its end and return its exit code; 130 after Ctrl-C, 143 after another stop signal.

    A stop signal is passed on; a second Ctrl-C or SIGQUIT kills the agent, and with it its ranks.

    Args:
        arguments: as for `agent.main.main`.
        environment: what the ranks' environment has beside this process's own.
        needs: the last of what is `IMPORTED` for it; what it needs beyond that it imports itself.
    """
    agent = start_agent(arguments, environment=environment, is_last=True, needs=needs)
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


def start_agent(
    arguments: list[str], *, environment: Mapping[str, str], files: Sequence[int] = (), is_last: bool = False, needs: str = COMPILER
) -> Child:
    """Start an agent (`agent.main.be_agent`), which has this process's environment and the locks of its folders.

    Args:
        arguments: as for `agent.main.main`.
        environment: what the ranks' environment has beside this process's own.
        files: descriptors that the arguments name.
        is_last: this process starts no other agent.
        needs: see `run_agent`.
    """
    global _nursery
    expect_agents()
    assert _nursery is not None
    request = {"arguments": arguments, "environment": {**os.environ, **environment, handover.STARTED: str(STARTED)}}
    agent = _nursery.start(request, files=[*descriptors(), *files], is_last=is_last, needs=needs)
    if is_last:
        _nursery = None
    return agent


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return what every rank's environment needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, len(os.sched_getaffinity(0)) // processes)
    return {VARIABLE: str(threads)} if threads_per_process or VARIABLE not in os.environ else {}
