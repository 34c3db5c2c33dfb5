"""torch's agent with rules of ours: how long ranks may take to end, after which failures they are started again, and what is a stop.

torch has no settings for them: it gives the survivors of a failure 30 s, starts every failure again, kills at a second signal, and calls a
rank failed that a stop signal has ended while it was importing.

Agents of ours do not look for each other: each is told who it is and where the store is. torchrun's own rendezvous (`--standalone` too)
serves its store on every interface, and unpickles what is written there: anyone who reaches the port runs code in the agent. Ours
unpickles nothing, and listens on one interface where one is enough.
"""

import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api

from ddp_train.config.cluster import LOOPBACK, REGISTRY
from ddp_train.distributed.store import join_served, serve_store, serve_store_on
from ddp_train.launch.agent.failures import FailureHandler
from ddp_train.launch.agent.ranks import Ranks
from ddp_train.system.process import STOP_SIGNALS, wait_for_ends

_SURVIVORS_S = 3  # how long ranks may take to end after another one has failed: they have nothing to save, and sit in a broken collective
_OTHERS_WITHIN_S = 0.1  # how long ranks that fail at the same time have to end by themselves, with their own reports

_LOOKS_EVERY_S = 1.0
"""How often it looks at the ranks by itself. The end of one and a signal wake it at once, and every look takes a processor from them."""


def run_elastic_agent(options: Namespace, ranks: Ranks, *, grace_s: int, failures: FailureHandler, restarts: int = 0) -> None:
    """Run torch's agent, with our rules, to its end. `torch.distributed.run.run` is torch's own without them (`cluster.agent=torch`).

    `grace_s`: `cluster.grace_s`. `restarts`: how often the ranks were started again before, by other agents: they are told so.

    Raises ChildFailedError: ranks failed, and are not started again.
    Raises SignalException: a signal came, and the ranks have ended.
    """
    if options.max_restarts == 0:
        ranks.to_start = int(options.nproc_per_node)
    options.log_dir = os.devnull  # torch would leave an empty folder in TMPDIR for each start
    with _torch_patched(partial(_Agent, grace_s=grace_s, failures=failures, restarts=restarts), ranks):
        torchrun.run(options)


@contextmanager
def _torch_patched(agent: Callable[..., LocalElasticAgent], ranks: Ranks) -> Iterator[None]:
    """Let torch make our agent, start the ranks as we do and take our handler of signals, while the block runs: it has no other way in."""
    received: list[int] = []  # the first stop signal
    ours: dict[tuple[ModuleType, str], Callable[..., object]] = {
        (api, "LocalElasticAgent"): agent,
        (multiprocessing, "get_subprocess_handler"): ranks.start,
        (multiprocessing, "_terminate_process_handler"): partial(_raise_on_first_signal, received),
    }
    before = {place: getattr(*place) for place in ours}
    try:
        for place, value in ours.items():
            setattr(*place, value)
        yield
    finally:
        for place, value in before.items():
            setattr(*place, value)


class _Agent(LocalElasticAgent):
    def __init__(self, *arguments: Any, grace_s: int, failures: FailureHandler, restarts: int, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "logs_specs": _NoLogs(os.devnull)})
        self._grace_s, self._failures = grace_s, failures
        self._remaining_restarts -= restarts
        self._ends_within_s = _SURVIVORS_S  # how long the ranks have in `close`

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        close, self._ends_within_s = self._pcontext.close, _SURVIVORS_S  # `_shutdown` may have changed it for the ranks before these
        # torch calls it when one has failed, and in `_shutdown`, with a time-out of its own.
        self._pcontext.close = lambda death_sig=None, timeout=0: close(death_sig, self._ends_within_s)  # type: ignore[method-assign]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        wait_for_ends(self._pcontext.pids().values(), within_s=_LOOKS_EVERY_S, others_within_s=_OTHERS_WITHIN_S)
        result: RunResult = super()._monitor_workers(worker_group)
        # A rank that has just begun does not listen to a stop signal, and has not failed. Those that we have ended do not count.
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        ended_by_us = {rank for rank, handler in handlers.items() if getattr(handler, "is_closed", False)}
        ended_by = [-failure.exitcode for failure in result.failures.values() if failure.local_rank not in ended_by_us]
        stops = [number for number in ended_by if number in STOP_SIGNALS]
        if result.is_failed() and stops:
            raise SignalException("a rank was stopped before it listened", sigval=signal.Signals(stops[0]))
        if result.is_failed() and not self._failures.handle(result.failures, self._remaining_restarts):
            self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks by `death_sig`: the signal that came to the agent. Torch calls it also when machines come or go."""
        self._ends_within_s = self._grace_s
        super()._shutdown(death_sig)  # before 2.13 torch's takes no time, and gives it none


class _NoLogs(DefaultLogsSpecs):
    """Leaves the output of ranks where it is, and starts no thread that reads it: each rank writes its own log."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


def _raise_on_first_signal(received: list[int], signum: int, frame: FrameType | None) -> None:
    """Handle a stop signal: the first one ends the ranks, which have `grace_s` for it; later ones are ignored.

    A batch system signals all processes of a task, and the agent's parent passes its signal on: at the second one torch would kill the
    ranks. Only SIGKILL ends an agent at once.
    """
    if not received:
        received.append(signum)
        raise SignalException(f"got signal {signum}", sigval=signal.Signals(signum))


def register_rendezvous() -> None:
    """Make `--rdzv-backend=loopback` and `registry` known to torchrun in this process."""
    rendezvous_handler_registry.register(LOOPBACK, _Loopback)
    rendezvous_handler_registry.register(REGISTRY, _OneAttempt)


class _Loopback(StaticTCPRendezvous):
    """The rendezvous of an agent that is alone: it serves the store itself. The newest store stays to the end of the process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new, empty store, to which the ranks connect: none of them serves one."""
        self._store = served = serve_store("127.0.0.1", 0)
        return RendezvousInfo(served, 0, 1, RendezvousStoreInfo("127.0.0.1", served.port))

    def get_backend(self) -> str:
        return LOOPBACK


class _OneAttempt(StaticTCPRendezvous):
    """The agents of one attempt on several machines (`node/attempts.py`). The first serves the store, at its parent's socket."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, _, port = parameters.endpoint.rpartition(":")
        rank, size = int(parameters.config["rank"]), parameters.max_nodes
        super().__init__(host.strip("[]"), int(port), rank=rank, world_size=size, run_id=parameters.run_id, timeout=0)
        self._listener = int(parameters.config["listener"])

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of this attempt, which is empty. torch calls this once for each agent."""
        if self.rank == 0:
            store = serve_store_on(socket.socket(fileno=self._listener), self.master_addr)
        else:
            store = join_served(self.master_addr, self.master_port)
        self._store = store
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port))

    def get_backend(self) -> str:
        return REGISTRY
