"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

    python -m ddp_train.agent [--run-dir=DIR] TORCHRUN_OPTIONS -m MODULE ARGS

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs and shows the one screen
that the failing rank left, or says itself which rank died of what.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddp_train import failure
from ddp_train.process import STOP_SIGNALS, die_with_parent
from ddp_train.run_dir import RunDir

_SAVING_S = 300
"""How long ranks may take to save after a stop signal; whoever is in a hurry sends a second one."""

_RUN_DIR_OPTION = "--run-dir="
_PASSED_ON = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str]) -> int:
    """Run the agent to its end and return the exit code of the run."""
    die_with_parent()
    run_dir = None
    if arguments and arguments[0].startswith(_RUN_DIR_OPTION):
        run_dir = RunDir(Path(arguments.pop(0).removeprefix(_RUN_DIR_OPTION)))
    _quieten(run_dir)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVING_S))
    arguments = [f"--signals-to-handle={','.join(number.name for number in _PASSED_ON)}", *arguments]
    started, oom_kills = time.monotonic(), failure.oom_kills()
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        was_out_of_memory = None if oom_kills is None else (failure.oom_kills() or 0) > oom_kills
        found = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode, was_out_of_memory=was_out_of_memory)
        if run_dir is not None:
            others = {other: failed.pid for other, failed in error.failures.items() if other != rank}
            found = found.beside(failure.last_words(run_dir, others))
        if run_dir is not None and _record(found, run_dir, seconds=time.monotonic() - started):
            print(found.screen(run_dir), file=sys.stderr, flush=True)
        elif run_dir is None and first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {found.host} (pid {found.pid}): {found.message}", file=sys.stderr, flush=True)
        return max(1, first.exitcode)  # a rank that refused the input has said so with 2
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _record(found: failure.Failure, run_dir: RunDir, *, seconds: float) -> bool:
    try:
        return found.record(run_dir, seconds=seconds)
    except OSError:  # a full disk: the rank has shown its screen
        return False


def _quieten(run_dir: RunDir | None) -> None:
    """Send what torch's agent logs to a file, which is created with the first line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    handler: logging.Handler = logging.NullHandler()
    if run_dir is not None:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(run_dir.agent_log(0), delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("torch", "torch.distributed", "torch.distributed.run", "torch.distributed.elastic"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name.count(".") > 0
    logging.getLogger("torch").addHandler(handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
