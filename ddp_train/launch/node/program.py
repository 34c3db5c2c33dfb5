"""What runs on each machine of a run over several, whoever has started it: by hand, a task of SLURM, an ssh client.

    this program --(TCP, JSON)--> the registry on the first machine
         | forks, for each round
    torchrun's agent ----> the ranks

One event loop, no torch and no other thread: it forks. The first machine's program has the registry in it, and is its first member.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ddp_train.config.cluster import ROUND, environment_of
from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, INTERRUPTED, TERMINATED, UserError
from ddp_train.job import Job
from ddp_train.launch import restart_note
from ddp_train.launch.agent_process import rank_environment, start_agent
from ddp_train.launch.ending import exit_code
from ddp_train.launch.node.place import Place, look_anew
from ddp_train.launch.node.registry import Registry, plain_address
from ddp_train.launch.node.rounds import Rounds
from ddp_train.launch.node.wire import MOST_BYTES, SILENT_S, Line, Message, connect, is_proven, nonce, of_socket, proof, shown
from ddp_train.launch.node.work import Work
from ddp_train.launch.signals import is_final_stop
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result
from ddp_train.system import handover
from ddp_train.system.process import STOP_SIGNALS, Child, descendants, is_alive

_RETRY_S = 0.5
_CONNECT_S = 2.0
_ANSWERS_WITHIN_S = 5.0  # whoever listens at one of several addresses
_SAID_AFTER_S, _SAID_EVERY_S = 5.0, 30.0
_GONE_AFTER_S = 3.0  # a first machine that runs, and on which nobody listens any more
_OTHERS_SAY_S = 2.0  # what the first machine has to name a lost one, before one that has lost the first machine does
_STORE_S = 10.0
_SEES_WITHIN_S = 5.0
_DIES_WITHIN_S = 5.0
_GIVES_UP_S = 15.0  # an agent that was killed; more than what is waited for its ranks
_CLOSES_WITHIN_S = 3.0
_SAME_S = 2.0
_POLL_S = 0.05
_SHOWN = 200  # characters of an error


def run_node(work: Work, place: Place, *, received: Sequence[int] = ()) -> int:
    """Take part in a run until it ends, and return its exit code, the same on all machines.

    Args:
        work: what this machine brings. The first one's is done.
        place: this machine's.
        received: stop signals that have come already.
    """
    return asyncio.run(_Program(work, place).run(received))


class _End(Exception):
    """The program ends, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Program:
    def __init__(self, work: Work, place: Place) -> None:
        self._work, self._place = work, place
        self._life = uuid.uuid4().hex
        self._line: Line | None = None
        self._is_member = self._has_closed = False  # the second: the registry has ended the line
        self._dropped = ""  # what it said of it, if it has dropped this machine
        self._first_host = "the first machine"
        self._agent: Child | None = None
        self._agent_task: asyncio.Task[None] | None = None
        # Of this round; the agent may not have begun yet.
        self._told: int | None = None  # the stop signal that it was told first
        self._is_killed = False
        self._remains: list[int] = []  # the processes below an agent that was killed
        self._stops: list[int] = []  # the stop signals that came to this machine
        self._is_final = False  # one of them was to end all at once
        self._told_at = 0.0  # when the last one did
        self._round: Message | None = None  # the last one that was begun
        self._before: Result | None = None  # what result.json held then
        self._ours: socket.socket | None = None  # the first machine's end of its line to its own registry
        self._rounds: Rounds | None = None
        self._facts_file = ""  # for the first rank of a machine that is examined, which removes it

    async def run(self, received: Sequence[int]) -> int:
        loop = asyncio.get_running_loop()
        for each in STOP_SIGNALS:
            if signal.getsignal(each) != signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(each, self._on_signal, each)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `env --block-signal` may have held some back until now
        for number in received:
            self._on_signal(number)
        try:
            return await (self._lead() if self._place.is_first else self._take_part())
        except _End as end:
            return end.code
        finally:
            await self._end_agent()

    async def _lead(self) -> int:
        """Serve the registry, and take part (the first machine)."""
        assert self._place.listener is not None
        job = self._work.job
        registry = Registry(
            self._place,
            first=self._work.facts,
            token=self._work.token,
            folder=None if job is None else job.run_folder.root,
            takes_all=job is not None and bool(job.examines),
        )
        self._rounds = Rounds(registry, self._work, self._place)
        connections = set[asyncio.Task[None]]()

        def serve(line: Line, *, is_first: bool = False) -> None:
            task = asyncio.get_running_loop().create_task(registry.serve(line, is_first=is_first))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(
            lambda reader, writer: serve(Line(reader, writer)), sock=self._place.listener, limit=MOST_BYTES, start_serving=True
        )
        self._ours, theirs = socket.socketpair()
        serve(await of_socket(theirs), is_first=True)
        self._place.publish()
        rounds = asyncio.get_running_loop().create_task(self._rounds.run())
        own = asyncio.get_running_loop().create_task(self._take_part())
        try:
            await asyncio.wait({rounds, own}, return_when=asyncio.FIRST_COMPLETED)
            code = self._code_of(rounds, own, registry)
            registry.send("over", code=code)
            with suppress(TimeoutError):  # until everybody has heard it
                async with asyncio.timeout(_CLOSES_WITHIN_S):
                    while any(not machine.is_first for machine in registry.machines):
                        await asyncio.sleep(_POLL_S)
            return code
        finally:
            server.close()
            if self._place.notice is not None:
                with suppress(OSError):
                    self._place.notice.unlink()
            for task in (rounds, own, *connections):
                task.cancel()

    def _code_of(self, rounds: asyncio.Task[int], own: asyncio.Task[int], registry: Registry) -> int:
        """Return the code that the run has ended with; what went wrong in here (a full disk, say) is said to all (the first machine)."""
        try:
            if not rounds.done():
                own.result()
                return FAILED
            return rounds.result()
        except _End as end:
            return end.code
        except Exception as error:
            found, folder = failure.from_exception(error, rank=0, step=None), self._work.run_folder
            if folder is not None:
                found.record_unless_ended(folder, before=None if self._rounds is None else self._rounds.before)
            registry.say(f"the node program of {self._work.facts.host}, the first machine, has failed: {found.line(_SHOWN)}")
            traceback.print_exception(error)
            return found.exit_code

    async def _take_part(self) -> int:
        """Be a member until the run has ended, and return its exit code."""
        while True:
            line = await self._join()
            why, self._has_closed, self._dropped = f"{self._first_host} has been silent for {SILENT_S:.0f} s", False, ""
            try:
                code = await self._follow(line)
            except TimeoutError:
                code = None
            else:
                self._has_closed = not self._dropped  # who drops a machine is still there
                why = self._dropped or f"{self._first_host} has ended its node program, or the line to it was cut"
            self._is_member = False
            line.cut()
            if code is not None:
                return code
            await self._be_lost(why)

    async def _join(self) -> Line:
        """Come to the registry, and be taken in."""
        began, is_back = time.monotonic(), self._round is not None
        say_at, deadline = began + _SAID_AFTER_S, began + self._work.cluster.join_timeout_s
        refused_since: float | None = None
        while True:
            line, problem = await self._try(deadline)
            if line is not None:
                return line
            now = time.monotonic()
            # Its program has ended when it closed the line, or when its machine answers that nobody listens.
            refused_since = (refused_since or now) if is_back and (self._has_closed or "refused" in problem) else None
            if refused_since is not None and now > refused_since + _GONE_AFTER_S:
                self._end_without_it("has ended its node program")
            if now > deadline:
                print(f"\n{self._unreachable(problem)}", file=sys.stderr, flush=True)
                raise _End(FAILED if is_back else ENVIRONMENT_REFUSES)
            if now > say_at:
                say_at = now + _SAID_EVERY_S
                print(f"waiting for the first machine: {problem}", file=sys.stderr, flush=True)
            await asyncio.sleep(_RETRY_S)

    async def _try(self, deadline: float) -> tuple[Line | None, str]:
        """Try each place where the registry may be once; return the line, or why there is none."""
        if self._ours is not None:
            line = await of_socket(self._ours)
            return line, await self._introduce(line, deadline)
        problem = "it has not said yet where it is"
        addresses = self._place.registry_addresses()
        for host, port in addresses:
            self._leave_if_told()
            try:
                line = await connect(host, port, within_s=_CONNECT_S)
            except OSError as error:
                problem = f"{host}:{port} could not be reached: {_reason(error)}"
                continue
            is_only_one = len(addresses) == 1  # else whoever is silent at one address keeps nobody from the next
            try:
                problem = await self._introduce(
                    line, deadline if is_only_one else min(deadline, time.monotonic() + _ANSWERS_WITHIN_S), is_only_one=is_only_one
                )
            except OSError as error:  # it has closed the line before we could ask who it is
                problem = f"{host}:{port} has closed the line: {_reason(error)}"
            if not problem:
                return line, ""
            line.cut()
        self._leave_if_told()
        return None, problem

    async def _introduce(self, line: Line, deadline: float, *, is_only_one: bool = True) -> str:
        """Tell the registry what this machine is; return "" when it is taken in, or why not yet.

        Raises:
            _End: it is refused.
        """
        self._line, token, ours, theirs = line, self._work.token, nonce(), None
        facts, where = self._work.facts.now(), line.connection.getpeername()
        while True:
            try:
                message = await line.receive(silent_s=max(1.0, deadline - time.monotonic()))
            except TimeoutError:
                return f"whoever listens at {where[0]}:{where[1]} does not answer"
            if message is None:
                return "it has closed the line"
            if message.get("kind") == "challenge" and theirs is None:
                theirs = str(message.get("nonce"))
                line.send(
                    "hello",
                    name=facts.host,
                    nonce=ours,
                    proof=proof(token, by="member", over=theirs, own=ours),
                    life=self._life,
                    pid=os.getpid(),
                    index=self._place.index,
                    processes=self._work.processes,
                    facts=facts.to_json(),
                )
            elif theirs is None:
                return f"who listens at {where[0]}:{where[1]} is no ddp_train of this version"
            elif message.get("kind") == "say":
                print(shown(message.get("text")), file=sys.stderr, flush=True)
            elif message.get("kind") == "look":
                line.send("seen", sees=await _sees(str(message.get("folder", ""))), utc=time.time())
            elif message.get("kind") == "refused":
                if message.get("is_foreign") and not is_only_one:
                    return "another run is there"
                reasons = "\n  ".join(
                    [f"{message.get('first')} refuses this machine, {facts.host}:", *map(str, message.get("reasons", []))]
                )
                print(f"\n{shown(reasons)}", file=sys.stderr, flush=True)
                raise _End(ENVIRONMENT_REFUSES)
            elif message.get("kind") == "welcome":
                if not is_proven(message.get("proof"), proof(token, by="registry", over=ours, own=theirs)):
                    if not is_only_one:
                        return "somebody else is there"
                    print(f"\n{self._impostor(where)}", file=sys.stderr, flush=True)
                    raise _End(ENVIRONMENT_REFUSES)
                self._first_host, self._is_member = shown(message["first"]), True
                line.beat()
                for place, number in enumerate(self._stops):
                    line.send("stop", signal=number, is_final=is_final_stop(number, self._stops[:place]))
                return ""

    async def _follow(self, line: Line) -> int | None:
        """Do what the registry says until the run has ended; return its exit code, or None when the line has ended.

        Raises:
            TimeoutError: the first machine is silent.
        """
        while (message := await line.receive(silent_s=None if self._ours is not None else SILENT_S)) is not None:
            kind = message["kind"]
            if kind == "round":
                self._begin(message)
                self._agent_task = asyncio.get_running_loop().create_task(self._run_agent(message, line))
            elif kind == "stop" and self._told is None:
                self._tell(message["signal"])
            elif kind == "kill" and self._round is not None and message["round"] == self._round["number"]:
                self._kill()
            elif kind == "say":
                print(message["text"], file=sys.stderr, flush=True)
            elif kind == "dropped":
                self._dropped = f"{self._first_host} has dropped this machine: it {message['why']}"
            elif kind == "over":
                return int(message["code"])
        return None

    async def _run_agent(self, message: Message, line: Line) -> None:
        """Run this machine's agent for one round, and say how it has ended."""
        listener: socket.socket | None = None
        if self._rounds is not None:
            listener, self._rounds.listener = self._rounds.listener, None
        try:
            code, why = await self._end_of_agent(message, line, listener)
        except Exception as error:  # no process more is to be had, say: the other machines wait for a word
            self._kill()
            self._agent = None
            found = failure.from_exception(error, rank=0, step=None)
            code, why = FAILED, f"its agent could not be run: {found.line(_SHOWN)}"
            with suppress(Exception):  # the message may be what is wrong
                if (folder := _folder_of(message)) is not None:
                    found.record_unless_ended(folder, before=self._before)
        finally:
            if listener is not None:
                listener.close()
        line.send("ended", round=message["number"], code=code, why=why)

    async def _end_of_agent(self, message: Message, line: Line, listener: socket.socket | None) -> tuple[int, str]:
        """Run this machine's agent for one round; return the code of its end, and why where somebody has to be told."""
        number, folder = message["number"], _folder_of(message)
        self._before = None if folder is None else failure.read_result(folder)
        if listener is not None:
            host = plain_address(listener.getsockname()[0]).replace("0.0.0.0", "127.0.0.1")
            host = "127.0.0.1" if host == "::" else host
        else:
            host = plain_address(line.connection.getpeername()[0])
            if (problem := await _unreachable_store(host, message["port"])) and not (self._told or self._is_killed):
                return ENVIRONMENT_REFUSES, problem
        if self._told or self._is_killed:
            return 128 + (signal.SIGKILL if self._is_killed else self._told or 0), ""
        if (
            number > 1 and message["job"] is not None and restart_note.recall(owner=os.getpid()) is None
        ):  # no rank came so far as to write it
            job = Job.from_json(message["job"])
            restart_note.remember(Path(job.checkpoint or job.run_folder.root), owner=os.getpid())
        self._agent = agent = start_agent(self._arguments(message, host=host, listener=listener), environment=self._environment(message))
        if listener is not None:
            listener.close()
        while (code := agent.exit_code()) is None:
            await asyncio.sleep(_POLL_S)
        deadline = time.monotonic() + _DIES_WITHIN_S
        while any(map(is_alive, self._remains)) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._agent = None
        if self._facts_file:
            Path(self._facts_file).unlink(missing_ok=True)  # no rank came so far
        why = ""
        if code < 0 and not self._is_killed and -code not in STOP_SIGNALS:
            found = failure.from_agent(pid=agent.pid, signal_name=signal.Signals(-code).name)
            why = found.message
            if folder is not None:
                found.record_unless_ended(folder, before=self._before)
        return code if code >= 0 else 128 - code, why

    def _arguments(self, message: Message, *, host: str, listener: socket.socket | None) -> list[str]:
        """Return what this machine's agent is told for a round."""
        own = [f"--grace-s={self._work.cluster.grace_s}", *([f"--run-dir={folder.root}"] if (folder := _folder_of(message)) else [])]
        conf = f"rank={message['rank']},listener={-1 if listener is None else listener.fileno()}"
        return [
            *own,
            f"--restarts={message['restarts']}",
            f"--max-restarts={message['max_restarts']}",
            f"--nnodes={message['nodes']}",
            f"--nproc-per-node={self._work.processes}",
            f"--rdzv-backend={ROUND}",
            f"--rdzv-id={message['name']}",
            f"--rdzv-endpoint={f'[{host}]' if ':' in host else host}:{message['port']}",
            f"--rdzv-conf={conf}",
            "-m",
            "ddp_train",
            *(self._work.arguments if message["job"] is None else ()),
        ]

    def _environment(self, message: Message) -> dict[str, str]:
        """Return what the ranks' environment has beside this process's own."""
        cluster = self._work.cluster
        found = rank_environment(self._work.processes, cluster.threads_per_process) | environment_of(cluster.env)
        found[handover.NODE] = str(os.getpid())
        if message["job"] is not None:
            found[handover.JOB] = message["job"]
            if Job.from_json(message["job"]).examines and (path := self._work.facts.to_file()) is not None:
                found[handover.FACTS] = self._facts_file = path
        return found

    async def _be_lost(self, why: str) -> None:
        """End what runs here, because nobody else can; return where this machine is to come back.

        Raises:
            _End: it is not.
        """
        is_in_a_round = self._agent_task is not None and not self._agent_task.done()
        print(
            f"{why}; {'the ranks of this machine are ended' if is_in_a_round else 'no round is at work here'}", file=sys.stderr, flush=True
        )
        has_ended = await self._end_agent()  # before anything else: what looks at the run's folder may wait for a network that is gone
        if not has_ended or self._ours is not None:  # it has no place in another round; and without the first machine there is none
            raise _End(FAILED)
        self._leave_if_told()
        if self._round is None:
            return
        if self._place.is_elastic or self._round["restarts"] < self._round["max_restarts"]:
            within_s = self._work.cluster.join_timeout_s
            print(f"this machine tries to come back, for {within_s} s at most", file=sys.stderr, flush=True)
            return
        await asyncio.sleep(_OTHERS_SAY_S)
        self._end_without_it("is lost to this machine")

    def _end_without_it(self, why: str) -> NoReturn:
        """End as the run has ended, which the first machine could not say; name it in the run's folder where nobody has named one.

        Raises:
            _End: always.
        """
        text = f"{self._first_host} {why}"
        if self._round is not None and (folder := _folder_of(self._round)) is not None:
            if failure.ended_since(folder, self._before) is not None:
                print(f"{text}; the run itself has ended as it should", file=sys.stderr, flush=True)
                raise _End(exit_code(folder, FAILED, before=self._before))
            found = failure.from_machine(host=self._first_host, ranks=range(self._round["first_ranks"]), why=why)
            if found.record_unless_ended(folder, before=self._before):
                text = found.screen(folder)
        print(text, file=sys.stderr, flush=True)
        raise _End(FAILED)

    def _on_signal(self, number: int) -> None:
        """Take up a stop signal: the first lets all machines save and end, the second ends them at once."""
        told_at, now = self._told_at, time.monotonic()
        self._told_at = now
        if number != signal.SIGINT and number in self._stops and now < told_at + _SAME_S:
            return  # a batch system sends it to the step and to its task
        is_final = is_final_stop(number, self._stops)
        self._is_final = self._is_final or is_final
        self._stops.append(number)
        if number == signal.SIGINT and not is_final:
            os.write(2, b"\nstopping after this step; Ctrl-C again ends it at once\n")
        if is_final:
            self._kill()
        else:
            self._tell(number)
        if self._is_member and self._line is not None:
            self._line.send("stop", signal=self._stops[-1], is_final=is_final)
        elif self._line is not None and self._ours is None:
            self._line.cut()  # nobody counts on this machine yet

    def _leave_if_told(self) -> None:
        """End where a stop signal came, and the registry cannot be told."""
        if self._stops and self._ours is None:
            raise _End(INTERRUPTED if signal.SIGINT in self._stops else TERMINATED)

    def _begin(self, message: Message) -> None:
        """Take up a round. A stop of ours that has crossed it on the line holds for it: the registry passes it on to the others only."""
        self._round = message
        self._told, self._is_killed, self._remains = next(iter(self._stops), None), self._is_final, []

    def _tell(self, number: int) -> None:
        """Tell the agent of this round to stop; one that has yet to begin does not begin."""
        self._told = self._told or number
        if self._agent is not None:
            self._agent.signal(number)

    def _kill(self) -> None:
        """Kill the agent of this round, and its ranks end with it; one that has yet to begin does not begin."""
        self._is_killed = True
        if self._agent is not None:
            self._remains = [*self._remains, *descendants(self._agent.pid)]
            self._agent.signal(signal.SIGKILL)

    async def _end_agent(self) -> bool:
        """Kill the agent and wait for its end; tell whether it has come."""
        task, self._agent_task = self._agent_task, None
        if task is None:
            return True
        self._kill()
        await asyncio.wait({task}, timeout=_GIVES_UP_S)
        if not task.done():
            print("the agent of this machine does not end, although it was killed: the kernel holds it", file=sys.stderr, flush=True)
        return task.done()

    def _impostor(self, where: tuple[object, ...]) -> UserError:
        return UserError(
            key="cluster.rendezvous_id",
            happened=f"whoever listens at {where[0]}:{where[1]} does not know this run's word; nothing that it sends is run",
            expected="the first machine of this run",
            fix="look who listens there; the same cluster.rendezvous_id on all machines, or another port",
        )

    def _unreachable(self, problem: str) -> UserError:
        return UserError(
            key="cluster.rendezvous_endpoint",
            happened=f"the first machine was not there in {self._work.cluster.join_timeout_s} s: {problem}",
            expected="the run on the first machine, at a port that is open between the machines",
            fix="start the run there too; or another host and port; or a longer cluster.join_timeout_s",
        )


async def _sees(folder: str) -> bool:
    """Tell whether this machine sees the run's folder; "" is none. A network file system may show a new one some seconds late."""
    deadline = time.monotonic() + _SEES_WITHIN_S
    while not (is_there := not folder or os.path.isdir(folder)) and time.monotonic() < deadline:
        await asyncio.sleep(_RETRY_S)
        with suppress(OSError):
            look_anew(Path(folder).parent)
    return is_there


def _folder_of(message: Message) -> RunFolder | None:
    """Return the run folder of a round; None where there is none (`Work.run_folder`)."""
    job = None if message["job"] is None else Job.from_json(message["job"])
    return None if job is None or job.examines else job.run_folder


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return os.strerror(error.errno) if error.errno else "no answer"  # asyncio's own text names the address again


async def _unreachable_store(host: str, port: int) -> str:
    """Say why the store of a round cannot be reached; "" when it can."""
    try:
        async with asyncio.timeout(_STORE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return f"cannot reach {host}:{port}, where the ranks are to meet: {_reason(error)}; open all ports between the machines"
    writer.close()
    return ""
