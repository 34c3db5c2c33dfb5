"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

    python -m ddp_train.agent [--run-dir=DIR] TORCHRUN_OPTIONS -m MODULE ARGS

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs and shows the one screen
that the failing rank left, or says itself which rank died of what.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from ddp_train import failure, rendezvous
from ddp_train.process import die_with_parent
from ddp_train.restart import Deaths
from ddp_train.run_dir import RunDir

_ENVIRONMENT_REFUSES = 78
_RUN_DIR_OPTION = "--run-dir="


def main(arguments: list[str]) -> int:
    """Run the agent to its end and return the exit code of the run."""
    die_with_parent()
    run_dir = None
    if arguments and arguments[0].startswith(_RUN_DIR_OPTION):
        run_dir = RunDir(Path(arguments.pop(0).removeprefix(_RUN_DIR_OPTION)))
    _quieten(run_dir)
    deaths = None if run_dir is None else Deaths(run_dir)
    if deaths is not None:
        logging.getLogger("torch").addHandler(deaths)
    options = torchrun.parse_args(arguments)
    started = time.monotonic()
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        found = failure.from_exit(rank=rank, pid=first.pid, exit_code=first.exitcode)
        is_first = run_dir is not None and _record(found, run_dir, seconds=time.monotonic() - started)
        if run_dir is not None and (is_first or (deaths is not None and deaths.pid == first.pid)):
            print(found.screen(run_dir), file=sys.stderr, flush=True)
        elif run_dir is None and first.exitcode < 0:
            print(f"\nThe run failed: rank {rank} on {found.host} (pid {found.pid}): {found.message}", file=sys.stderr, flush=True)
        return max(1, first.exitcode)  # a rank that refused the input has said so with 2
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError) as error:
        print(f"\n{rendezvous.explain(error, options)}", file=sys.stderr, flush=True)
        return _ENVIRONMENT_REFUSES
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
