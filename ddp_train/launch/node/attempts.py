"""The attempts of a run over several machines: only the first machine says when all ranks start, and when that attempt ends.

    gather machines -> an attempt -> it was completed, or stopped                -> the end
                          ^       -> a rank or a machine was lost: one restart   -> again, or the end
                          |       -> a machine has come: all save and end        -> again, which costs no restart
                          +------------------------------------------------------------------+

Everything that is counted is counted here, once for all machines.
"""

import asyncio
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from ddp_train.errors import DONE, FAILED, FINAL, NO_PROGRESS, ConfigError, EnvironmentRefuses, code_of_signals, shell_code
from ddp_train.launch.node.registry import Came, Lost, Node, NodeEvent, Registry
from ddp_train.launch.node.registry_client import ProgramEnd
from ddp_train.launch.node.this_node import ThisNode, with_world_size
from ddp_train.launch.node.wire import Ended, NewAttempt, Signalled
from ddp_train.run_folder import failure
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.verdict import exit_code_after_agent
from ddp_train.system.network import listen
from ddp_train.system.process import STOP_SIGNALS

_LAST_CALL_S = 2.0  # how long an elastic run that has machines enough waits for one more
_NAMED_AFTER_S = 4.0  # who is missing: after the start and after each that comes
_NAMED_EVERY_S = 30.0  # and then again
_TELLS_S = 5.0  # how long the others may come to hear what is wrong with the first machine
_SURVIVORS_S = 4.0  # what the agents of other machines have after a failure, to say what their ranks died of
_MARGIN_S = 15.0  # in addition to cluster.grace_s, before agents that were told to stop are killed
_DIES_WITHIN_S = 10.0  # an agent that was killed
_POLL_S = 0.1
_ABOUT_TO_BE_LOST_S = 4.0  # a machine that is silent for so long when another one is lost
_STOPPED_CODES = tuple(shell_code(-number) for number in STOP_SIGNALS)  # with which an agent ends that was told to


class _EndCause(StrEnum):
    """Why an attempt was told to end."""

    STOP = "stop"
    JOIN = "join"  # a machine has come
    FAILURE = "failure"


@dataclass
class _RunningAttempt:
    """One start of all ranks, until all have ended."""

    number: int
    nodes: list[Node]
    codes: dict[Node, int] = field(default_factory=dict)  # how the agents ended
    lost: list[Node] = field(default_factory=list)
    end_cause: _EndCause | None = None
    kill_at: float = float("inf")
    is_killed: bool = False
    is_cut_off: bool = False  # it is this machine that was lost, and not the others

    @property
    def open_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node not in self.codes and node not in self.lost]

    def end(self, why: _EndCause, *, within_s: float) -> None:
        if self.end_cause != _EndCause.FAILURE:
            self.end_cause = why
        self.kill_at = min(self.kill_at, time.monotonic() + within_s)

    def ranks_of(self, node: Node) -> range:
        first = sum(other.facts.processes for other in self.nodes[: self.nodes.index(node)])
        return range(first, first + node.facts.processes)


class Attempts:
    """Begins attempts until the run has ended (the first machine). Made and used in one event loop."""

    def __init__(self, registry: Registry, this_node: ThisNode) -> None:
        self._registry, self._this_node = registry, this_node
        self._rendezvous, self._job = this_node.rendezvous, this_node.job
        self.before = None if this_node.run_folder is None else this_node.run_folder.read_result()
        self._number = 0  # of attempts
        self._restarts = 0
        self._stop_signal: int | None = None  # the first one
        self._is_final = False  # a second stop signal came
        self._store_listener: socket.socket | None = None  # of the newest attempt, until the first machine's agent has it

    async def run(self) -> int:
        """Return the exit code of the run."""
        try:
            while True:
                attempt = self._begin(await self._gather())
                await self._watch(attempt)
                if (code := self._judge(attempt)) is not None:
                    return code
        except ProgramEnd as end:  # no attempt may begin
            return end.code

    def pop_store_listener(self) -> socket.socket | None:
        """Hand over the socket at which the first machine's agent is to serve the newest attempt's store."""
        listener, self._store_listener = self._store_listener, None
        return listener

    async def _gather(self) -> list[Node]:
        """Wait for machines enough, and return them. ProgramEnd: they do not come, or may not train."""
        registry, rendezvous, began = self._registry, self._rendezvous, time.monotonic()
        report_at = began + _NAMED_AFTER_S
        enough_since: float | None = None
        problems = [] if registry.takes_all else self._this_node.facts.problems
        for problem in problems:
            print(f"{problem}, on {self._this_node.facts.host}, the first machine", file=sys.stderr, flush=True)
        while True:
            now = time.monotonic()
            if self._stop_signal is not None:
                raise ProgramEnd(self._exit_code(code_of_signals([self._stop_signal])))
            if problems and now > began + _TELLS_S:
                self._refuse("\n".join(problems))
            if rendezvous.is_fixed and not rendezvous.is_elastic and registry.refusal:
                self._refuse(registry.refusal)
            count = len(registry.nodes)
            enough_since = None if count < rendezvous.min_nodes else enough_since or now
            is_last_call_over = enough_since is not None and (self._number > 0 or now > enough_since + _LAST_CALL_S)
            are_enough = count == rendezvous.max_nodes or is_last_call_over
            if are_enough and not problems and all(node.is_fresh for node in registry.nodes):
                return list(registry.nodes)
            if now > began + self._this_node.cluster.join_timeout_s and count < rendezvous.min_nodes:
                self._end_with_too_few()
            if now > report_at and count < rendezvous.min_nodes:
                report_at = now + _NAMED_EVERY_S
                registry.say(f"waiting: {registry.describe_missing()}")
            if (event := await self._next_event()) is not None and isinstance(event.what, Came):
                report_at = min(report_at, time.monotonic() + _NAMED_AFTER_S)

    def _begin(self, nodes: list[Node]) -> _RunningAttempt:
        self._number += 1
        world_size = sum(node.facts.processes for node in nodes)
        if self._job is not None:
            try:
                self._job = with_world_size(self._job, world_size)
            except ConfigError as error:
                self._registry.say(f"\n{error}")
                raise ProgramEnd(error.exit_code) from None
        # One interface, where all others have found us at it; TCP to several addresses of ours at once is rare.
        our_addresses = {node.our_address for node in nodes if not node.is_first} or {"127.0.0.1"}
        if (unused := self.pop_store_listener()) is not None:  # of an attempt in which our own agent never began
            unused.close()
        self._store_listener = listen(our_addresses.pop() if len(our_addresses) == 1 else "", 0)
        name = uuid.uuid4().hex
        for rank, node in enumerate(nodes):
            attempt = NewAttempt(
                number=self._number,
                name=name,
                rank=rank,
                nodes=len(nodes),
                port=self._store_listener.getsockname()[1],
                restarts=self._restarts,
                max_restarts=self._this_node.max_restarts,
                first_ranks=nodes[0].facts.processes,
                job=None if self._job is None else self._job.to_json(),
            )
            node.line.send("attempt", **attempt._asdict())
        return _RunningAttempt(self._number, nodes)

    async def _watch(self, attempt: _RunningAttempt) -> None:
        """Wait until the agents of all machines have ended, and end them where that has to be."""
        while attempt.open_nodes:
            if (event := await self._next_event()) is not None:
                self._handle(event, attempt)
            now = time.monotonic()
            if self._stop_signal is not None and attempt.end_cause not in (_EndCause.STOP, _EndCause.FAILURE):
                attempt.end(_EndCause.STOP, within_s=self._this_node.cluster.grace_s + _MARGIN_S)
            if self._is_final:
                attempt.kill_at = min(attempt.kill_at, now)
            if now >= attempt.kill_at + _DIES_WITHIN_S:
                for node in attempt.open_nodes:
                    self._registry.drop(node, "has an agent that cannot be killed")
            elif now >= attempt.kill_at and not attempt.is_killed:
                attempt.is_killed = True
                for node in attempt.open_nodes:
                    node.line.send("kill", attempt=attempt.number)

    def _handle(self, event: NodeEvent, attempt: _RunningAttempt) -> None:
        node = event.node
        match event.what:
            case Ended(number, code, why) if number == attempt.number and node in attempt.open_nodes:
                attempt.codes[node] = FAILED if attempt.is_killed and code == shell_code(-signal.SIGKILL) else code
                if code != DONE and not attempt.end_cause:
                    attempt.end(_EndCause.FAILURE, within_s=_SURVIVORS_S)
                    if why:
                        self._registry.say(f"{node.name}: {why}")
            case Lost(why) if node in attempt.open_nodes:
                attempt.lost.append(node)
                self._report_loss(node, why, attempt)
                attempt.end(_EndCause.FAILURE, within_s=0.0)
            case Came() if not attempt.end_cause and node not in attempt.nodes and node in self._registry.nodes:
                self._registry.say(f"{node.name} joined: the run saves, and continues with {len(self._registry.nodes)} machines")
                attempt.end(_EndCause.JOIN, within_s=self._this_node.cluster.grace_s + _MARGIN_S)
                for other in attempt.open_nodes:
                    other.line.send("stop", signal=int(signal.SIGTERM))

    def _pass_on(self, stop: Signalled, node: Node) -> None:
        """Pass a stop signal that came to one machine on to all."""
        self._is_final = self._is_final or stop.is_final
        if self._stop_signal is None:
            self._stop_signal = stop.signal
            self._registry.say(f"{signal.Signals(stop.signal).name} on {node.name}: all machines save and stop")
            for other in self._registry.nodes:
                if other is not node:
                    other.line.send("stop", signal=stop.signal)
        elif stop.signal == signal.SIGINT:
            self._stop_signal = stop.signal  # a Ctrl-C counts more than the batch system's warning before it

    def _report_loss(self, node: Node, why: str, attempt: _RunningAttempt) -> None:
        """Name a machine that was lost, before ranks that have lost it can name each other."""
        if attempt.is_cut_off:
            return
        others = [other for other in attempt.nodes if not other.is_first and other not in attempt.lost]
        attempt.is_cut_off = bool(others) and all(other.line.silent_s > _ABOUT_TO_BE_LOST_S for other in others)
        if attempt.is_cut_off:
            why = f"cannot reach any other machine ({', '.join(other.name for other in (node, *others))})"
            node = attempt.nodes[0]
        report = failure.from_machine(host=node.name, ranks=attempt.ranks_of(node), why=why)
        folder = self._this_node.run_folder
        is_last = self._stop_signal is not None or self._restarts >= self._this_node.max_restarts
        if folder is not None and not folder.has_ended_since(self.before) and report.record(folder) and is_last:
            print(report.screen(folder), file=sys.stderr, flush=True)
        self._registry.say(f"{report.message}; the ranks of all machines are stopped")

    def _judge(self, attempt: _RunningAttempt) -> int | None:
        """Return the exit code of the run, or None where another attempt is to follow."""
        if self._stop_signal is not None:
            return self._exit_code(code_of_signals([self._stop_signal]))
        folder = self._this_node.run_folder
        expected = (DONE, *_STOPPED_CODES) if attempt.end_cause == _EndCause.JOIN else (DONE,)
        failures = [code for code in attempt.codes.values() if code not in expected]
        first_failure = max(FAILED, failures[0]) if failures else DONE
        code = next((code for code in failures if code in FINAL), first_failure)
        is_ended = folder is not None and folder.has_ended_since(self.before)
        is_failed = not is_ended and bool(attempt.lost or failures)
        if attempt.end_cause == _EndCause.JOIN and not is_failed and not (folder is not None and folder.is_completed()):
            if folder is not None:
                folder.archive_failure()  # it says `preempted`
            return None
        if not is_failed:
            return self._exit_code(code)
        code = code or FAILED
        if code in FINAL:
            return code
        if folder is not None and (no_progress := AttemptCount(folder).fail()):
            self._registry.say(no_progress.screen(folder))
            return NO_PROGRESS
        if self._restarts >= self._this_node.max_restarts or any(node.is_first for node in attempt.lost):  # without it no machine leads
            why = ""
            if folder is not None and (report := failure.load_report(folder.failure)) is not None:
                why = f": {report.who}: {report.line(200)}; {folder.as_typed()}/{folder.failure.name}"
            self._registry.say(f"the run failed{why}")
            return code
        self._restarts += 1
        return None

    def _exit_code(self, code: int) -> int:
        """Return the exit code of a run that has stopped or ended well, with this code of its agents."""
        folder = self._this_node.run_folder
        return code if folder is None else exit_code_after_agent(folder, code, before=self.before)

    def _refuse(self, why: str) -> NoReturn:
        """Say in the run's folder that it cannot run on these machines, and end."""
        error = EnvironmentRefuses(happened=why, expected="machines that agree with the first one")
        if self._this_node.run_folder is not None:
            failure.from_exception(error, rank=0, step=None).record(self._this_node.run_folder)
        raise ProgramEnd(error.exit_code)

    def _end_with_too_few(self) -> NoReturn:
        within_s = self._this_node.cluster.join_timeout_s
        happened = f"fewer than {self._rendezvous.min_nodes} machines joined within {within_s} s: {self._registry.describe_missing()}"
        fix = "start the run there too, or raise cluster.join_timeout_s if machines start late"
        error = ConfigError(key="cluster.join_timeout_s", happened=happened, expected="the same command on every machine", fix=fix)
        self._registry.say(f"\n{error}")
        if self._number == 0:
            self._refuse(error.happened)
        raise ProgramEnd(FAILED)

    async def _next_event(self) -> NodeEvent | None:
        """Return the next event, and pass it on where it is a stop; None after a moment without one."""
        try:
            async with asyncio.timeout(_POLL_S):
                event = await self._registry.events.get()
        except TimeoutError:
            return None
        if isinstance(event.what, Signalled):
            self._pass_on(event.what, event.node)
        return event
