"""What a machine's program does with what it hears: with a registry that says what it is told to, and agents that are none."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_train.errors import FAILED, TERMINATED
from ddp_train.launch.fork_requests import AgentOptions
from ddp_train.launch.job import Job
from ddp_train.launch.node import attempt_agent, registry_client
from ddp_train.launch.node import program as module
from ddp_train.launch.node.program import _FirstNodeProgram, _NodeProgram
from ddp_train.launch.node.registry_client import ProgramEnd
from ddp_train.launch.node.this_node import NodeRendezvous, ThisNode
from ddp_train.launch.node.wire import JsonMessage, Line, LineLost, of_socket
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.network import listen
from tests.unit.launch.node_facts.machines import facts
from tests.unit.parts import checked


@dataclass
class Agent:
    """An agent that ends when it is killed or told to stop, unless it is held."""

    pid: int = 2**22 + 1  # nobody's
    is_held: bool = False
    heard: list[int] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.heard.append(number)

    def exit_code(self) -> int | None:
        return -self.heard[0] if self.heard and not self.is_held else None


class Agents(list[Agent]):
    """Those that were started."""

    problem: OSError | None = None
    is_held = False

    def start(self, options: AgentOptions, arguments: list[str], *, environment: dict[str, str], files: list[int]) -> Agent:
        if self.problem is not None:
            raise self.problem
        self.append(Agent(is_held=self.is_held))
        return self[-1]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Agents:
    found = Agents()
    monkeypatch.setattr(attempt_agent, "start_agent", found.start)
    for where, name in ((attempt_agent, "_POLL_S"), (module, "_POLL_S"), (registry_client, "_RETRY_S"), (module, "_OTHERS_SAY_S")):
        monkeypatch.setattr(where, name, 0.01)
    monkeypatch.setattr(attempt_agent, "_GIVES_UP_S", 0.3)
    monkeypatch.setattr(registry_client, "_GONE_AFTER_S", 0.2)
    return found


def store(monkeypatch: pytest.MonkeyPatch, *, within_s: float = 0.0, problem: str = "") -> None:
    """Say whether the store of an attempt can be reached, after a while."""

    async def ask(host: str, port: int) -> str:
        await asyncio.sleep(within_s)
        return problem

    monkeypatch.setattr(attempt_agent, "_unreachable_store", ask)


def job(folder: Path) -> Job:
    return Job(config=checked(), run_folder=RunFolder(folder), command=[], overrides=[])


def an_attempt(folder: Path, *, number: int = 1, restarts: int = 0, max_restarts: int = 0) -> JsonMessage:
    names = {"name": "r", "rank": 1, "nodes": 2, "port": 1, "first_ranks": 2, "job": job(folder).to_json()}
    return {"number": number, "restarts": restarts, "max_restarts": max_restarts, **names}


def a_program(folder: Path, *, join_timeout_s: int = 30, **changes: Any) -> _NodeProgram:
    place = NodeRendezvous(**{"min_nodes": 2, "max_nodes": 2, "node_rank": 1} | changes)
    cluster = replace(checked().cluster, join_timeout_s=join_timeout_s)
    this_node = ThisNode(rendezvous=place, cluster=cluster, facts=facts(), max_restarts=0, job=job(folder) if place.is_first else None)
    return _FirstNodeProgram(this_node) if place.is_first else _NodeProgram(this_node)


@dataclass
class Bed:
    program: _NodeProgram
    registry: Line
    end: asyncio.Task[JsonMessage]
    heard: list[JsonMessage] = field(default_factory=list)

    async def ended(self) -> JsonMessage:
        """Return how the agent has ended, as the registry hears it."""
        async with asyncio.timeout(5):
            while (message := await self.registry.receive())["kind"] != "ended":
                self.heard.append(message)
        return message


@asynccontextmanager
async def bed(folder: Path, **changes: Any) -> AsyncIterator[Bed]:
    """Let a program follow a registry, over TCP."""
    listener = listen("127.0.0.1", 0)
    ours = socket.create_connection(listener.getsockname()[:2])
    theirs, _ = listener.accept()
    line, registry = await of_socket(ours), await of_socket(theirs)
    program = a_program(folder, **changes)
    program._client.line, program._client.has_joined = line, True
    end = asyncio.get_running_loop().create_task(program._follow(line))
    try:
        yield Bed(program, registry, end)
    finally:
        await program._end_agent()
        end.cancel()
        with suppress(asyncio.CancelledError, LineLost):
            await end
        for each in (line, registry):
            each.cut()
        listener.close()
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def test_an_agent_that_cannot_be_started_is_said_and_reported(tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> JsonMessage:
        agents.problem = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        async with bed(tmp_path) as found:
            found.registry.send("attempt", **an_attempt(tmp_path))
            return await found.ended()

    store(monkeypatch)
    ended = asyncio.run(story())
    assert ended["code"] == FAILED and "temporarily unavailable" in ended["why"]
    report = failure.load_report(RunFolder(tmp_path).failure)
    assert report is not None and report.error == "BlockingIOError"


@pytest.mark.parametrize("within_s", [0.0, 0.2])
@pytest.mark.parametrize("how", ["stop", "kill", "signal", "signal before"])
def test_a_stop_between_the_attempt_and_the_agents_start_is_kept(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch, how: str, within_s: float
) -> None:
    async def story() -> JsonMessage:
        async with bed(tmp_path) as found:
            if how == "signal before":  # it has crossed the attempt on the line
                found.program._on_signal(signal.SIGTERM)
            found.registry.send("attempt", **an_attempt(tmp_path))
            if how == "stop":
                found.registry.send("stop", signal=int(signal.SIGTERM))
            elif how == "kill":
                found.registry.send("kill", attempt=1)
            elif how == "signal":
                await until(lambda: found.program._agent is not None)
                found.program._on_signal(signal.SIGTERM)
            return await found.ended()

    store(monkeypatch, within_s=within_s, problem="" if within_s == 0 else "nobody is there any more")
    assert asyncio.run(story())["code"] == (128 + signal.SIGKILL if how == "kill" else TERMINATED)
    assert not within_s or agents == []
    assert not RunFolder(tmp_path).failure.exists()


def test_a_stop_and_a_kill_are_of_one_attempt(tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with bed(tmp_path) as found:
            for number in (1, 2):
                found.registry.send("attempt", **an_attempt(tmp_path, number=number))
                await until(lambda count=number: len(agents) == count)
                assert agents[-1].heard == []
                if number == 2:
                    found.registry.send("kill", attempt=1)
                found.registry.send("stop", signal=int(signal.SIGTERM))
                assert (await found.ended())["code"] == TERMINATED
                assert agents[-1].heard == [signal.SIGTERM]

    store(monkeypatch)
    asyncio.run(story())


def test_our_own_kill_is_no_failure_and_somebody_elses_is(tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(*, is_ours: bool) -> JsonMessage:
        agents.clear()
        async with bed(tmp_path) as found:
            found.registry.send("attempt", **an_attempt(tmp_path))
            await until(lambda: agents)
            if is_ours:
                found.registry.send("kill", attempt=1)
            else:
                agents[-1].heard.append(signal.SIGKILL)
            return await found.ended()

    store(monkeypatch)
    assert asyncio.run(story(is_ours=True)) | {"attempt": 1} == {"kind": "ended", "attempt": 1, "code": 137, "why": ""}
    assert not RunFolder(tmp_path).failure.exists()  # the agent had no ranks yet
    assert "was ended by SIGKILL" in asyncio.run(story(is_ours=False))["why"]
    assert RunFolder(tmp_path).failure.exists()


def test_an_agent_that_outlives_a_kill_holds_nobody(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> int:
        agents.is_held = True
        async with bed(tmp_path) as found:
            found.registry.send("attempt", **an_attempt(tmp_path, max_restarts=3))
            await until(lambda: agents)
            with pytest.raises(ProgramEnd) as end:
                await found.program._end_as_lost("node0 is silent")
            agents[-1].is_held = False
            return end.value.code

    store(monkeypatch)
    assert asyncio.run(story()) == FAILED
    assert "the kernel does not end it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code"), [(Status.COMPLETED, 0), (Status.PREEMPTED, 75), (Status.INTERRUPTED, 130), (None, FAILED), (Status.FAILED, FAILED)]
)
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_lost_machine_ends_as_the_run_has_ended(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch, status: Status | None, code: int, max_restarts: int
) -> None:
    """The others went on, and their node programs have ended."""

    async def story() -> int:
        with listen("127.0.0.1", 0) as closed:
            address = ("127.0.0.1", closed.getsockname()[1])
        async with bed(tmp_path, host=address[0], ports=address[1:]) as found:
            found.registry.send("attempt", **an_attempt(tmp_path, max_restarts=max_restarts))
            await until(lambda: agents)
            if status is not None:
                Result(status=status, step=3).write(RunFolder(tmp_path).result)
            with pytest.raises(ProgramEnd) as end:
                await lose(found.program)
            return end.value.code

    async def lose(program: _NodeProgram) -> None:
        await program._end_as_lost("node0 is silent")
        assert await program._client.join(is_back=True, has_closed=False) is None
        program._end_without_it("ended its node program")

    store(monkeypatch)
    assert asyncio.run(story()) == code
    after = RunFolder(tmp_path).read_result()
    assert after is not None and after.status == (status or Status.FAILED)
    assert RunFolder(tmp_path).failure.exists() == (code == FAILED)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_machine_that_was_dropped_waits_for_its_place(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch, is_dropped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one whose line was closed without a word waits for a moment only."""

    async def story() -> int:
        async with bed(tmp_path, host="host.invalid", ports=(1,), join_timeout_s=1) as found:
            way = found.program._client
            assert way.line is not None
            join, lines = way.join, [way.line]
            found.end.cancel()

            async def join_at_once(**how: bool) -> Line:
                return lines.pop() if lines else await join(**how)

            monkeypatch.setattr(way, "join", join_at_once)
            monkeypatch.setattr(way, "_try", unreachable)
            end = asyncio.get_running_loop().create_task(found.program._take_part())
            found.registry.send("attempt", **an_attempt(tmp_path, max_restarts=3))
            await until(lambda: agents)
            if is_dropped:
                found.registry.send("dropped", why="has an agent that cannot be killed")
            found.registry.cut()
            with pytest.raises(ProgramEnd) as ended:
                await end
            return ended.value.code

    async def unreachable(deadline: float) -> tuple[None, str]:
        return None, "no route"

    store(monkeypatch)
    assert asyncio.run(story()) == FAILED
    said = capsys.readouterr().err
    assert ("dropped this machine: it has an agent that cannot be killed" in said) == is_dropped
    assert ("did not answer within 1 s" in said) == is_dropped and ("ended its node program; lost" in said) != is_dropped


def test_a_line_that_is_gone_at_once_and_a_silent_stranger_end_nothing(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(line: Line, listener: str, deadline: float, **how: Any) -> None:
        raise LineLost("is gone")

    async def story() -> tuple[str, float]:
        with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as two:
            program = a_program(tmp_path, host="127.0.0.1", ports=tuple(each.getsockname()[1] for each in (one, two)))
            began = asyncio.get_running_loop().time()
            line, problem = await program._client._try(began + 600)
            took_s = asyncio.get_running_loop().time() - began
            assert line is None and "has been silent for 1 s" in problem
            monkeypatch.setattr(program._client, "_introduce", gone)
            line, problem = await program._client._try(began + 600)
            assert line is None
            return problem, took_s

    monkeypatch.setattr(registry_client, "_ANSWERS_WITHIN_S", 0.1)
    problem, took_s = asyncio.run(story())
    assert "is gone" in problem and took_s < 10


def test_what_goes_wrong_on_the_first_machine_is_reported_and_ends_the_run(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object) -> int:
        await asyncio.sleep(0.1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Attempts, "run", broken)
    sent, send = list[tuple[str, dict[str, Any]]](), Line.send

    def note(line: Line, kind: str, **fields: Any) -> None:
        sent.append((kind, fields))
        send(line, kind, **fields)

    monkeypatch.setattr(Line, "send", note)
    program = a_program(tmp_path, node_rank=0, listener=listen("127.0.0.1", 0))
    monkeypatch.setattr(module, "_CLOSES_WITHIN_S", 0.1)

    async def story() -> int:
        code = await program.run(())
        assert program._client.line is not None
        program._client.line.cut()
        await asyncio.sleep(0.05)
        return code

    assert asyncio.run(story()) == FAILED
    assert [fields for kind, fields in sent if kind == "over"] == [{"code": FAILED}]
    report = failure.load_report(RunFolder(tmp_path).failure)
    assert report is not None and "No space left" in report.message
