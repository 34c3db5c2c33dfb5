"""One node's agent: torchrun's own (torch.distributed.run), with a better ending.

torchrun ends a failed run with a page of its own internals. This one keeps that page in the run's logs, and `agent/failures.py` shows one
screen instead.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, UserError, shell_code
from ddp_train.launch.agent import elastic
from ddp_train.launch.agent.failures import FailureHandler, FailuresOfAttempt, FailuresOfRun
from ddp_train.launch.agent.ranks import Ranks, loads_alike
from ddp_train.launch.fork_requests import AgentOptions, AgentRequest
from ddp_train.system import process_env, torch_internals
from ddp_train.system.fork_server import RequestHandler
from ddp_train.system.process import STOP_SIGNALS, file_in_memory, path_of
from ddp_train.system.redaction import Redacting

_TORCH_AGENT = (
    "agent    torchrun's own: ranks have 30 s after a stop signal and none after a second one, whatever cluster.grace_s says;"
    " each failure is started again, up to cluster.max_restarts"
)
_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)


def become_agent(request: AgentRequest, *, loaded_with: Mapping[str, str], become_rank: RequestHandler) -> int:
    """Run the agent that was asked for (`launch.fork_requests.start_agent`) in this process, and return its exit code.

    `loaded_with`: the environment in which this process has imported. `become_rank`: what each process does that is forked as a rank.
    """
    environment = {**request.environment, process_env.AGENT: str(os.getpid())}
    for name in {process_env.JOB, process_env.FACTS} & environment.keys():  # in a variable, an exec has room for 128 KiB of it
        environment[name] = path_of(file_in_memory(environment[name].encode()))
    for name in loaded_with.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)  # added to what torch has set while it was imported
    ranks = Ranks(become_rank, files=request.files, imports=request.imports, is_forked=loads_alike(environment, loaded_with))
    try:
        return run_torchrun(request.options, request.arguments, ranks)
    finally:
        ranks.end()


def run_torchrun(options: AgentOptions, arguments: list[str], ranks: Ranks) -> int:
    """Run the agent, with torchrun's arguments, to its end and return the exit code of the run."""
    signals = ",".join(number.name for number in _PASSED_ON)
    lacks = torch_internals.missing(torch_internals.OF_AGENT)
    uses_torch_agent = options.uses_torch_agent or bool(lacks)
    interval = "0.1" if uses_torch_agent else "0.001"  # `elastic` waits itself
    torchrun_args = torchrun.parse_args([f"--signals-to-handle={signals}", f"--monitor-interval={interval}", *arguments])
    _quieten(options.run_folder.agent_log(options.node_rank) if options.run_folder is not None else None)
    elastic.register_rendezvous()
    failures: FailureHandler = FailuresOfRun(options.run_folder, in_sweep=options.in_sweep)
    if options.is_one_attempt:
        failures = FailuresOfAttempt(options.run_folder, is_last=options.restarts == torchrun_args.max_restarts)
    if uses_torch_agent and options.is_one_attempt:
        print(f"\n{UserError(key='cluster', happened=lacks[0], fix='torchrun --nnodes=N -m ddp_train on each machine')}", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    try:
        if uses_torch_agent:
            print(*lacks, _TORCH_AGENT, sep="\n", flush=True)
            torchrun.run(torchrun_args)
        else:
            elastic.run_elastic_agent(torchrun_args, ranks, grace_s=options.grace_s, failures=failures, restarts=options.restarts or 0)
    except ChildFailedError as error:
        return failures.end(error)
    except SignalException as error:
        return shell_code(-error.sigval)
    except DistError as error:
        if options.is_one_attempt:  # another machine was lost just then, and is named by those who have seen it
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
