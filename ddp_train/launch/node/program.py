"""What runs on each machine of a run over several, however it was started: by hand, a task of SLURM, an ssh client.

    this program --(TCP, JSON)--> the registry on the first machine
         | forks, for each attempt
    torchrun's agent ----> the ranks

One event loop, no torch and no other thread: it forks. The first machine's program has the registry in it, and is its first node.
"""

import asyncio
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from ddp_train.errors import FAILED
from ddp_train.launch.node.attempt_agent import SHOWN, AttemptAgent
from ddp_train.launch.node.attempts import Attempts
from ddp_train.launch.node.registry import Registry
from ddp_train.launch.node.registry_client import ProgramEnd, RegistryClient
from ddp_train.launch.node.this_node import ThisNode
from ddp_train.launch.node.wire import MAX_BYTES, SILENT_S, Line, LineLost, LineSilent, NewAttempt, of_socket
from ddp_train.launch.signals import LISTENED, announce_stop, is_final_stop
from ddp_train.run_folder import failure
from ddp_train.run_folder.verdict import exit_code_after_agent
from ddp_train.system.network import WAITING
from ddp_train.system.process import STOP_SIGNALS

_OTHERS_SAY_S = 2.0  # what the first machine has to name a lost one, before one that has lost the first machine does
_CLOSES_WITHIN_S = 3.0
_POLL_S = 0.05


def run_node(this_node: ThisNode, *, received: Sequence[int] = ()) -> int:
    """Take part in a run until it ends, and return its exit code, the same on all machines; `received`: signals that came before."""
    program = _FirstNodeProgram(this_node) if this_node.rendezvous.is_first else _NodeProgram(this_node)
    return asyncio.run(program.run(received))


class _NodeProgram:
    """Takes part in a run that the first machine leads."""

    def __init__(self, this_node: ThisNode) -> None:
        self._this_node, self._rendezvous = this_node, this_node.rendezvous
        self._stops: list[int] = []  # the stop signals that came to this machine
        self._is_final = False  # one of them was to end all at once
        self._client = RegistryClient(this_node, self._stops)
        self._agent: AttemptAgent | None = None  # of the newest attempt
        self._pop_store_listener: Callable[[], socket.socket | None] = lambda: None  # only the first machine's agent serves the store

    async def run(self, received: Sequence[int]) -> int:
        loop = asyncio.get_running_loop()
        for listened in LISTENED:
            if signal.getsignal(listened) != signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(listened, self._on_signal, listened)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `env --block-signal` may have held some back until now
        for number in received:
            self._on_signal(number)
        try:
            return await self._take_part()
        except ProgramEnd as end:
            return end.code
        finally:
            await self._end_agent()

    async def _take_part(self) -> int:
        """Be a node of the run until it has ended, and return its exit code."""
        client = self._client
        has_closed = False
        while True:
            left = None if self._agent is None else self._agent.folder
            client.left = "" if left is None else str(left.root)
            line = await client.join(is_back=self._agent is not None, has_closed=has_closed)
            if line is None:
                self._end_without_it("ended its node program")
            try:
                last = await self._follow(line)
                if isinstance(last, int):
                    return last
                why = f"{client.first_host} dropped this machine: it {last}"
                has_closed = False  # who drops a machine is still there
            except LineLost as lost:
                why = f"{client.first_host} {lost}"
                has_closed = not isinstance(lost, LineSilent)
            finally:
                client.has_joined = False
                line.cut()
            await self._end_as_lost(why)

    async def _follow(self, line: Line) -> int | str:
        """Do what the registry says; return the run's exit code when it is over, or why this machine was dropped."""
        while True:
            agent = self._agent
            match await line.receive(silent_s=None if self._rendezvous.is_first else SILENT_S):
                case {"kind": "attempt", **fields}:
                    self._agent = AttemptAgent(self._this_node, NewAttempt(**fields), line, listener=self._pop_store_listener())
                    if self._stops:  # the signal has crossed the message on the line: the registry passes it on to the others only
                        self._agent.send_signal(self._stops[0])
                    if self._is_final:
                        self._agent.kill()
                    self._agent.start()
                case {"kind": "stop", "signal": number} if agent is not None and agent.stop_signal is None:
                    agent.send_signal(number)
                case {"kind": "kill", "attempt": number} if agent is not None and number == agent.attempt.number:
                    agent.kill()
                case {"kind": "say", "text": text}:
                    print(text, file=sys.stderr, flush=True)
                case {"kind": "over", "code": int() as outcome} | {"kind": "dropped", "why": str() as outcome}:
                    return outcome

    async def _end_as_lost(self, why: str) -> None:
        """End the ranks of this machine, which is cut off; return where this machine is to join again, else end the program."""
        is_at_work = self._agent is not None and self._agent.is_at_work
        here = "the ranks of this machine are stopped" if is_at_work else "no ranks run here"
        print(f"{why}; {here}", file=sys.stderr, flush=True)
        has_ended = await self._end_agent()  # before anything else: what looks at the run's folder may wait for a network that is gone
        if not has_ended or self._rendezvous.is_first:  # it has no place in another attempt; and without the first machine there is none
            raise ProgramEnd(FAILED)
        self._client.end_if_stopped()
        if self._agent is None:
            return
        if self._rendezvous.is_elastic or self._agent.attempt.restarts < self._agent.attempt.max_restarts:
            within_s = self._this_node.cluster.join_timeout_s
            print(f"this machine tries to rejoin for at most {within_s} s", file=sys.stderr, flush=True)
            return
        await asyncio.sleep(_OTHERS_SAY_S)
        self._end_without_it("cannot be reached from this machine")

    def _end_without_it(self, why: str) -> NoReturn:
        """End as the run has ended, which the first machine could not say; name it in the run's folder if no report is there."""
        text = f"{self._client.first_host} {why}"
        agent = self._agent
        if agent is not None and (folder := agent.folder) is not None:
            if folder.has_ended_since(agent.before):
                print(f"{text}; the run itself ended normally", file=sys.stderr, flush=True)
                raise ProgramEnd(exit_code_after_agent(folder, FAILED, before=agent.before))
            report = failure.from_machine(host=self._client.first_host, ranks=range(agent.attempt.first_ranks), why=why)
            if report.record(folder):
                text = report.screen(folder)
        print(text, file=sys.stderr, flush=True)
        raise ProgramEnd(FAILED)

    def _on_signal(self, number: int) -> None:
        """Take up a stop signal: all machines save and end; after a second Ctrl-C or SIGQUIT they end at once."""
        is_first = not self._stops
        is_final = is_final_stop(number, self._stops)
        self._is_final = self._is_final or is_final
        self._stops.append(number)
        if is_first and not is_final:
            announce_stop(number)
        if self._agent is not None:
            if is_final:
                self._agent.kill()
            else:
                self._agent.send_signal(number)
        line = self._client.line
        if line is not None and self._client.has_joined:
            line.send("stop", signal=number, is_final=is_final)
        elif line is not None and not self._rendezvous.is_first:
            line.cut()  # the registry does not have this machine yet

    async def _end_agent(self) -> bool:
        return self._agent is None or await self._agent.end()


class _FirstNodeProgram(_NodeProgram):
    """Leads the run: serves the registry, counts the attempts, and takes part in them as its first node."""

    def __init__(self, this_node: ThisNode) -> None:
        super().__init__(this_node)
        self._registry = Registry(this_node)
        self._attempts = Attempts(self._registry, this_node)
        self._pop_store_listener = self._attempts.pop_store_listener

    async def _take_part(self) -> int:
        registry, listener = self._registry, self._rendezvous.listener
        server = await asyncio.start_server(lambda *ends: registry.serve(Line(*ends)), sock=listener, limit=MAX_BYTES, backlog=WAITING)
        self._client.own_end, registrys_end = socket.socketpair()
        own_line = await of_socket(registrys_end)
        self._rendezvous.publish()
        own_connection = asyncio.create_task(registry.serve(own_line, is_first=True))
        attempts = asyncio.create_task(self._attempts.run())
        own = asyncio.create_task(super()._take_part())
        try:
            await asyncio.wait({attempts, own}, return_when=asyncio.FIRST_COMPLETED)
            code = self._exit_code(attempts, own)
            for node in registry.nodes:
                node.line.send("over", code=code)
            with suppress(TimeoutError):  # until everybody has heard it
                async with asyncio.timeout(_CLOSES_WITHIN_S):
                    while any(not node.is_first for node in registry.nodes):
                        await asyncio.sleep(_POLL_S)
            return code
        finally:
            server.close()
            if self._rendezvous.meeting_file is not None:
                with suppress(OSError):
                    self._rendezvous.meeting_file.unlink()
            for task in (attempts, own, own_connection):
                task.cancel()

    def _exit_code(self, attempts: asyncio.Task[int], own: asyncio.Task[int]) -> int:
        """Return the code that the run has ended with; what went wrong in here (a full disk, say) is said to all."""
        try:
            if not attempts.done():
                own.result()
                return FAILED
            return attempts.result()
        except ProgramEnd as end:
            return end.code
        except Exception as error:
            report = failure.from_exception(error, rank=0, step=None)
            folder = self._this_node.run_folder
            if folder is not None and not folder.has_ended_since(self._attempts.before):
                report.record(folder)
            self._registry.say(f"the node program of {self._this_node.facts.host}, the first machine, failed: {report.line(SHOWN)}")
            traceback.print_exception(error)
            return report.exit_code
