"""The exit codes of `ddp-train`; docs/architecture.md explains them to users."""

from __future__ import annotations

DONE = 0
FAILED = 1
WRONG_INPUT = 2  # nothing was started
PREEMPTED = 75  # stopped by SIGTERM, SIGUSR1 or SIGHUP, saved: run it again
ENVIRONMENT_REFUSES = 78  # do not run it again before something is mended
INTERRUPTED = 130  # stopped by Ctrl-C
TERMINATED = 143  # stopped by a signal before there was anything to save

STOPPED = {"interrupted": INTERRUPTED, "preempted": PREEMPTED}
"""The status of a run that a signal stopped in good order (SIGINT, any other) -> the exit code."""
