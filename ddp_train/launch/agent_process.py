"""Start a torchrun agent as a child process, pass signals on, and wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ddp_train import devices

_INTERRUPTED = 130


def run_agent(arguments: list[str], *, environment: Mapping[str, str]) -> int:
    """Run `python -m ddp_train.agent ARGUMENTS` to its end and return its exit code (130 after Ctrl-C).

    The agent is in its own session: Ctrl-C on the terminal reaches us alone, and we tell the agent once.
    """
    command = [sys.executable, "-m", "ddp_train.agent", *arguments]
    agent = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    interrupted = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = interrupted or number == signal.SIGINT
        agent.send_signal(signal.SIGTERM)

    before: dict[int, Any] = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        return _INTERRUPTED
    return code if code >= 0 else 128 - code


def rank_environment(processes: int, threads_per_process: int | None) -> dict[str, str]:
    """Return what every rank's environment needs before torch starts: threads that share the cores instead of fighting for them."""
    threads = threads_per_process or max(1, devices.cores() // processes)
    return {"OMP_NUM_THREADS": str(threads)} if threads_per_process or "OMP_NUM_THREADS" not in os.environ else {}
