"""The exit codes of `ddp-train`; docs/architecture.md explains them to users."""

from __future__ import annotations

DONE = 0
FAILED = 1
WRONG_INPUT = 2  # something that a person has to mend: the command line, the config, the data
PREEMPTED = 75  # stopped by a signal or before the walltime ends, saved: run it again
ENVIRONMENT_REFUSES = 78  # do not run it again before something is mended
NO_PROGRESS = 93  # started again and again without getting further: do not run it again before something is mended
INTERRUPTED = 130  # stopped by Ctrl-C
TERMINATED = 143  # stopped by a signal before there was anything to save

STOPPED = {"interrupted": INTERRUPTED, "preempted": PREEMPTED}
"""The status of a run that a signal stopped in good order (SIGINT, any other) -> the exit code."""

FINAL = (WRONG_INPUT, ENVIRONMENT_REFUSES, NO_PROGRESS)
"""What a rank exits with when starting it again would end the same way."""
