"""Start a torchrun agent as a child process, pass signals on, and wait for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from ddp_train import devices
from ddp_train.process import STOP_SIGNALS

_INTERRUPTED, _TERMINATED = 130, 143


def run_agent(arguments: list[str], *, environment: Mapping[str, str]) -> int:
    """Run an agent to its end and return its exit code; 130 after Ctrl-C, 143 after another stop signal.

    A stop signal is passed on; a second Ctrl-C or SIGTERM kills the agent, and with it its ranks.

    The agent is forked, not started anew: checking the config has imported torch already, which takes a second. This process has no other
    thread, so that a fork is safe; the ranks are started as fresh interpreters by the agent.

    Args:
        arguments: as for `python -m ddp_train.agent`.
        environment: what the ranks' environment has beside this process's own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    agent = os.fork()
    if agent == 0:
        _become_agent(arguments, environment)
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        is_final = number != signal.SIGUSR1 and any(earlier != signal.SIGUSR1 for earlier in received)  # SIGUSR1 is an early warning
        received.append(signal.SIGINT if is_final else number)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(agent, signal.SIGKILL if is_final else number)
        if number == signal.SIGINT and not is_final:
            os.write(2, b"\nstopping after this step; Ctrl-C again ends it at once\n")  # not print: it may be printing right now

    before: dict[int, Any] = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        _, status = os.waitpid(agent, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return _INTERRUPTED if signal.SIGINT in received else _TERMINATED
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(
            f"\nThe run failed: its agent (pid {agent}) was ended by {signal.Signals(-code).name}; its ranks ended with it", file=sys.stderr
        )
    return code if code >= 0 else 128 - code


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return what every rank's environment needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, devices.cores() // processes)
    return {"OMP_NUM_THREADS": str(threads)} if threads_per_process or "OMP_NUM_THREADS" not in os.environ else {}


def _become_agent(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Turn this forked process into an agent; never returns."""
    code = 1
    try:
        os.setsid()  # Ctrl-C on the terminal reaches the parent alone, which tells us once
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(environment)
        from ddp_train import agent  # imports torch: in this process only

        code = agent.main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
