"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs and shows the one screen
that the failing rank left, or says itself which rank died of what.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddp_train import torch_internals
from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, UserError
from ddp_train.launch.agent import elastic
from ddp_train.launch.agent.failures import Failures, take_options
from ddp_train.launch.agent.ranks import Ranks, fits
from ddp_train.redaction import Redacting
from ddp_train.system import handover
from ddp_train.system.fork_server import Entry
from ddp_train.system.process import STOP_SIGNALS

_PLAIN = (
    "agent    torchrun's own: ranks have 30 s after a stop signal and none after a second one, whatever cluster.grace_s says;"
    " each failure is started again, up to cluster.max_restarts"
)
_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)


def run_agent_here(request: Mapping[str, Any], run_request: Entry) -> int:
    """Run the agent that was asked for (`launch.agent_process.start_agent`) in this process, and return its exit code.

    Args:
        run_request: what is done in each process that is forked as a rank.
    """
    environment, loaded_with = {**request["environment"], handover.AGENT: str(os.getpid())}, request["loaded_with"]
    for name in loaded_with.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)  # beside what torch has set while it was imported
    ranks = Ranks(run_request, files=request["files"], imports=request["imports"], is_forked=fits(environment, loaded_with))
    try:
        return main(request["arguments"], ranks)
    finally:
        ranks.end()


def main(arguments: list[str], ranks: Ranks) -> int:
    """Run the agent to its end and return the exit code of the run.

    Args:
        ranks: starts them.
        arguments: --grace-s=SECONDS [--agent=torch] [--run-dir=DIR [--restarts=N] | --group=DIR --log=FILE] TORCHRUN_OPTIONS -m MODULE ARGS
    """
    own = take_options(arguments)
    signals = ",".join(number.name for number in _PASSED_ON)
    lacks = torch_internals.missing(torch_internals.OF_AGENT)
    is_plain = own.is_plain or bool(lacks)
    interval = "0.1" if is_plain else "0.001"  # `elastic` waits itself
    options = torchrun.parse_args([f"--signals-to-handle={signals}", f"--monitor-interval={interval}", *arguments])
    number = next((int(part.removeprefix("rank=")) for part in options.rdzv_conf.split(",") if part.startswith("rank=")), 0)
    _quieten(own.log or (own.run_folder.agent_log(number) if own.run_folder is not None else None))
    elastic.register_rendezvous()
    failures = Failures(own, is_last_round=own.restarts == options.max_restarts)
    if is_plain and own.in_round:
        print(f"\n{UserError(key='cluster', happened=lacks[0], fix='torchrun --nnodes=N -m ddp_train on each machine')}", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    try:
        if is_plain:
            print(*lacks, _PLAIN, sep="\n", flush=True)
            torchrun.run(options)
        else:
            elastic.run(options, ranks, grace_s=own.grace_s, again=failures.again, restarts=own.restarts or 0)
    except ChildFailedError as error:
        return failures.end(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except DistError as error:
        if own.in_round:  # another machine was lost just then, and is named by those who have seen it
            logging.getLogger("torch").warning("the ranks' store is gone: %s", error)
            return FAILED
        reason = str(error).partition("\n")[0]
        print(f"\n{UserError(key='cluster', happened=f'the ranks cannot meet on this machine: {reason}')}", file=sys.stderr, flush=True)
        return ENVIRONMENT_REFUSES
    return 0


def _quieten(log: Path | None) -> None:
    """Send what torch's agent logs to a file, which is created with the first line."""
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not drown the failure's screen
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    handler: logging.Handler = logging.NullHandler()
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log, delay=True)
        handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("torch", "torch.distributed", "torch.distributed.run", "torch.distributed.elastic"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name.count(".") > 0
    logging.getLogger("torch").addHandler(handler)
