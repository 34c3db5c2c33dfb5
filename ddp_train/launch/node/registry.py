"""The service on the first machine: who is here, who is refused and why, and who is lost. `attempts` decides what comes of it."""

import asyncio
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from ddp_train.errors import plural
from ddp_train.launch.node.this_node import ThisNode
from ddp_train.launch.node.wire import SILENT_S, Ended, JsonMessage, Line, LineLost, LineSilent, Signalled, is_proven, proof, shown
from ddp_train.launch.node_facts.differences import clock, differences
from ddp_train.launch.node_facts.facts import NodeFacts
from ddp_train.launch.signals import LISTENED
from ddp_train.system.network import plain_address

_HELLO_WITHIN_S = 10.0
_MAX_NAME = 100  # characters
_SAID_AGAIN_S = 30.0
_MAX_REFUSALS = 20  # that are shown in that time
_STALE_S = 2.5  # longer than between two signs of life: nothing is begun with a machine that has said nothing for so long


@dataclass(eq=False, kw_only=True)
class Node:
    """A machine that was taken in."""

    name: str
    facts: NodeFacts
    line: Line
    program: str  # the number of its node program
    our_address: str  # at which it has found this machine
    is_first: bool = False

    @property
    def is_fresh(self) -> bool:
        """Whether it has given a sign of life just now."""
        return self.is_first or self.line.silent_s < _STALE_S

    @property
    def position(self) -> tuple[bool, float]:
        """What machines are sorted by: the first one first; then as they are numbered, else as they came."""
        return not self.is_first, float("inf") if self.facts.node_rank is None else self.facts.node_rank


class Came:
    """A machine was taken in."""


class Lost(NamedTuple):
    """A machine was lost, or sent away."""

    why: str


class NodeEvent(NamedTuple):
    """What happens on a machine: it came, was lost, or has sent a message."""

    node: Node
    what: Came | Lost | Ended | Signalled


class Registry:
    """The machines of one launch of a run. Made and used in one event loop."""

    def __init__(self, this_node: ThisNode) -> None:
        self._rendezvous, self._first, job = this_node.rendezvous, this_node.facts, this_node.job
        self._folder = "" if job is None else str(job.run_folder.root)  # which every machine must see; "": not known yet
        self.takes_all = job is not None and not job.is_resumable  # also who disagrees with the first: that program compares them itself
        self.nodes: list[Node] = []
        self.events: asyncio.Queue[NodeEvent] = asyncio.Queue()  # for `Attempts`
        self.lost: dict[str, str] = {}  # name -> what happened to it, until it is back
        self.refusal = ""  # of the first machine of this run that was refused
        self._refused: dict[str, float] = {}  # what was shown, or from where it came -> when: of the last seconds

    async def serve(self, line: Line, *, is_first: bool = False) -> None:
        """Serve one connection to its end; `is_first`: of the machine that this runs on."""
        try:
            with suppress(LineLost):  # it is refused, or not one of ours
                await self._listen_to(await self._take_in(line, is_first=is_first))
        finally:
            await line.close()

    def say(self, text: str) -> None:
        """Print a text on the terminals of all machines; any of them may have sent parts of it."""
        text = shown(text)
        print(text, file=sys.stderr, flush=True)
        for node in self.nodes:
            if not node.is_first:
                node.line.send("say", text=text)

    def drop(self, node: Node, why: str) -> None:
        if node not in self.nodes:
            return
        self.nodes.remove(node)
        self.lost[node.name] = why
        node.line.send("dropped", why=why)
        node.line.cut()
        self.events.put_nowait(NodeEvent(node, Lost(why)))

    def describe_missing(self) -> str:
        node_ranks = {node.facts.node_rank for node in self.nodes}
        hosts, num_nodes = self._rendezvous.hosts, self._rendezvous.max_nodes
        count = num_nodes - len(self.nodes)
        absent = [rank for rank in range(num_nodes) if rank not in node_ranks] if None not in node_ranks else []
        names = [f"machine {rank}" + (f" ({hosts[rank]})" if hosts else "") for rank in absent]
        lost = [f"{name} ({why})" for name, why in self.lost.items()]
        who = ", ".join(lost or names) or plural(count, "machine")
        present = ", ".join(node.name for node in self.nodes) or "none"
        return f"of {num_nodes} machines {who} {'is' if count == 1 else 'are'} missing; here: {present}"

    async def _take_in(self, line: Line, *, is_first: bool) -> Node:
        """Receive a machine's facts, and take it in. LineLost: it is refused, or not one of ours."""
        own_nonce = secrets.token_hex(16)
        line.send("challenge", nonce=own_nonce)
        hello = await line.receive(silent_s=_HELLO_WITHIN_S)
        if hello["kind"] != "hello":
            raise LineLost("is not a machine of this run")
        name = shown(hello.get("name"), _MAX_NAME)
        their_nonce = str(hello.get("nonce"))
        if not is_proven(hello.get("proof"), proof(self._rendezvous.token, by="node", over=own_nonce, own=their_nonce)):
            self._refuse(line, name, ["it belongs to another run"], is_foreign=True)
        if (facts := _facts(hello)) is None:
            self._refuse(line, name, ["it speaks another version of ddp_train"])
        if is_first:
            facts = self._first
        elif foreign := self._reasons_of_another_run(facts):
            self._refuse(line, name, foreign, is_foreign=True)
        if any(node.name == name and node.program != hello["program"] for node in self.nodes):  # two programs of one machine
            name = f"{name} (pid {hello['pid']})"
        reasons: list[str] = []
        if not is_first and not self.takes_all:
            own_problems = [f"{problem}, on {self._first.host}, the first machine" for problem in self._first.problems]
            reasons = own_problems or [*facts.problems, *differences(self._first, facts)]
        reasons = reasons or self._no_room_for(hello["program"], facts.node_rank)
        if not reasons and not is_first:
            reasons = await self._check_folder_and_clock(line, facts, name)
        if reasons:
            self._refuse(line, name, reasons)
        our_address = "" if is_first else plain_address(line.connection.getsockname()[0])
        node = Node(name=name, facts=facts, line=line, program=hello["program"], our_address=our_address, is_first=is_first)
        self.nodes.append(node)
        self.nodes.sort(key=lambda other: other.position)
        self.lost.pop(name, None)
        own_proof = proof(self._rendezvous.token, by="registry", over=their_nonce, own=own_nonce)
        line.send("welcome", first=self._first.host, folder=self._folder, proof=own_proof)
        line.beat()
        self.events.put_nowait(NodeEvent(node, Came()))
        return node

    def _reasons_of_another_run(self, facts: NodeFacts) -> list[str]:
        """Return why a machine is of another run; [] where it is of this one."""
        if facts.launch_id and self._first.launch_id and facts.launch_id != self._first.launch_id:
            return differences(self._first, facts)
        if facts.run not in (self._first.run, self._folder):
            # Equal configs say nothing: two runs that are resumed at one endpoint have them.
            there = self._first.run or self._folder or "a new one"
            return [f"another run is there: {there}; {facts.host} wants {facts.run or 'a new one'}"]
        return []

    async def _check_folder_and_clock(self, line: Line, facts: NodeFacts, name: str) -> list[str]:
        """Ask a machine whether it sees the run folder, and for its clock; return why it cannot take part."""
        sent = time.monotonic()
        line.send("look", folder=self._folder)
        try:
            answer = await line.receive(silent_s=_HELLO_WITHIN_S)
        except LineSilent:  # it may have a file system that hangs, and come again
            self._say_once(f"{name} does not say whether it sees {self._folder}: it cannot join now")
            raise
        if not isinstance(answer.get("utc"), (int, float)) or "sees" not in answer:
            return ["it speaks another version of ddp_train"]
        if self.takes_all:
            return []
        if not answer["sees"]:
            return [f"it does not see {self._folder}: put the run folder where every machine sees it"]
        if skew := clock(self._first.now(), replace(facts, utc=answer["utc"]), round_trip_s=time.monotonic() - sent):
            self.say(f"warning: {skew}")
        return []

    async def _listen_to(self, node: Node) -> None:
        try:
            while True:
                message = await node.line.receive(silent_s=None if node.is_first else SILENT_S)
                self.events.put_nowait(NodeEvent(node, _sent_by_member(message)))
        except LineLost as lost:
            self.drop(node, str(lost))

    def _no_room_for(self, program: str, node_rank: int | None) -> list[str]:
        """Return why a machine that agrees is not taken in; [] when it is."""
        for node in list(self.nodes):
            is_same = node.program == program
            has_its_place = node_rank is not None and node.facts.node_rank == node_rank
            if is_same or (has_its_place and not node.is_fresh):
                self.drop(node, "has joined again")
            elif has_its_place:
                return [f"machine {node_rank} is here already: {node.name}"]
        if len(self.nodes) >= self._rendezvous.max_nodes:
            return [f"the run has all {self._rendezvous.max_nodes} machines: {', '.join(node.name for node in self.nodes)}"]
        return []

    def _refuse(self, line: Line, name: str, reasons: list[str], *, is_foreign: bool = False) -> NoReturn:
        """Tell a machine, and the others, why it is not taken in."""
        line.send("refused", reasons=reasons, is_foreign=is_foreign, first=self._first.host)
        address = ""
        with suppress(OSError):  # it has gone; a line within this machine has no address
            address = plain_address(peer[0]) if isinstance(peer := line.connection.getpeername(), tuple) else ""
        who = f"{name} ({address})" if is_foreign and address else name
        text = shown("\n  ".join([f"{who} is refused:", *reasons]))
        if not is_foreign:
            self.refusal = self.refusal or text
        self._say_once(text, key=address if is_foreign else "")
        raise LineLost("is refused")

    def _say_once(self, text: str, *, key: str = "") -> None:
        """Print a text on a machine that may come again and again: once for each key (else text), and no more than people read."""
        now = time.monotonic()
        self._refused = {said: at for said, at in self._refused.items() if now - at <= _SAID_AGAIN_S}
        if (key or text) not in self._refused and len(self._refused) < _MAX_REFUSALS:
            self._refused[key or text] = now
            self.say(text)


def _sent_by_member(message: JsonMessage) -> Ended | Signalled:
    """Return the message of a machine that was taken in. LineLost: it is none of the kinds that a machine sends."""
    fields = {name: value for name, value in message.items() if name != "kind"}
    kind = {"ended": Ended, "stop": Signalled}.get(str(message["kind"]))
    types = {name: type(value) for name, value in fields.items()}
    if kind is None or types != kind.__annotations__ or fields.get("signal", LISTENED[0]) not in LISTENED:
        raise LineLost(f"sent an unknown message: {shown(message, _MAX_NAME)}")
    return Ended(**fields) if kind is Ended else Signalled(**fields)


def _facts(hello: JsonMessage) -> NodeFacts | None:
    """Return the facts in a machine's hello; None where its version tells others."""
    try:
        facts = NodeFacts.from_json(hello["facts"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_ours = isinstance(hello.get("program"), str) and isinstance(hello.get("pid"), int)
    return facts if is_ours and isinstance(facts.processes, int) and isinstance(facts.node_rank, int | None) else None
