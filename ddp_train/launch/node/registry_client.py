"""How a machine joins a run: it finds the registry, both prove that they know the run's token, and it is taken in or refused."""

import asyncio
import os
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ddp_train.errors import ENVIRONMENT_REFUSES, FAILED, UserError, code_of_signals
from ddp_train.launch.node.this_node import ThisNode
from ddp_train.launch.node.wire import JsonMessage, Line, LineLost, connect, is_proven, of_socket, proof, reason, shown
from ddp_train.launch.signals import is_final_stop
from ddp_train.system.files import refresh

_RETRY_S = 0.5
_CONNECT_S = 2.0
_ANSWERS_WITHIN_S = 5.0  # at one of several addresses
_REPORT_AFTER_S, _REPORT_EVERY_S = 5.0, 30.0
_GONE_AFTER_S = 3.0  # a first machine that runs, and on which no program listens any more
_SEES_WITHIN_S = 5.0


class ProgramEnd(Exception):
    """The node program ends, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class RegistryClient:
    """This machine's line to the registry, which it may have to open again."""

    def __init__(self, this_node: ThisNode, stops: Sequence[int]) -> None:
        self._this_node, self._rendezvous = this_node, this_node.rendezvous
        self._stops = stops  # the stop signals that have come to this machine, kept up to date by the program
        self._program = uuid.uuid4().hex
        self.own_end: socket.socket | None = None  # of the line within this process, on the first machine
        self.line: Line | None = None  # the last one, taken in or not
        self.has_joined = False  # the registry counts on this machine
        self.first_host = "the first machine"
        self.left = ""  # the folder of the run that this machine was in

    async def join(self, *, is_back: bool, has_closed: bool) -> Line | None:
        """Connect to the registry, and be taken in; None: the registry has ended. ProgramEnd: it is refused, stopped or too late.

        `is_back`: this machine was in the run before. `has_closed`: the registry has closed the line since, without a word.
        """
        report_at = time.monotonic() + _REPORT_AFTER_S
        deadline = time.monotonic() + self._this_node.cluster.join_timeout_s
        refused_since: float | None = None
        while True:
            line, problem = await self._try(deadline)
            if line is not None:
                return line
            now = time.monotonic()
            # Its program has ended when it closed the line, or when its machine answers that no program listens.
            refused_since = (refused_since or now) if is_back and (has_closed or "refused" in problem) else None
            if refused_since is not None and now > refused_since + _GONE_AFTER_S:
                return None
            if now > deadline:
                happened = f"the first machine did not answer within {self._this_node.cluster.join_timeout_s} s: {problem}"
                fix = "start the run there too; or use another open host and port; or raise cluster.join_timeout_s"
                error = UserError(key="cluster.rendezvous_endpoint", happened=happened, fix=fix)
                self._end(str(error), FAILED if is_back else ENVIRONMENT_REFUSES)
            if now > report_at:
                report_at = now + _REPORT_EVERY_S
                print(f"waiting for the first machine: {problem}", file=sys.stderr, flush=True)
            await asyncio.sleep(_RETRY_S)

    def end_if_stopped(self) -> None:
        """End where a stop signal came, and the registry cannot be told."""
        if self._stops and not self._rendezvous.is_first:
            raise ProgramEnd(code_of_signals(self._stops))

    async def _try(self, deadline: float) -> tuple[Line | None, str]:
        """Try each address of the registry once; return the line, or why there is none."""
        if self.own_end is not None:
            line = await of_socket(self.own_end)
            with suppress(LineLost):  # who reads from the line next learns it
                await self._introduce(line, "this process", deadline)
            return line, ""
        problem = "it has not published its address yet"
        addresses = self._rendezvous.registry_addresses()
        for host, port in addresses:
            self.end_if_stopped()
            try:
                line = await connect(host, port, within_s=_CONNECT_S)
            except OSError as error:
                problem = f"cannot reach {host}:{port}: {reason(error)}"
                continue
            is_only_one = len(addresses) == 1  # else silence at one address must not delay the next
            until = deadline if is_only_one else min(deadline, time.monotonic() + _ANSWERS_WITHIN_S)
            listener = f"the program that listens at {host}:{port}"
            try:
                await self._introduce(line, listener, until, is_only_one=is_only_one)
                return line, ""
            except LineLost as lost:
                problem = f"{listener} {lost}"
                line.cut()
        self.end_if_stopped()
        return None, problem

    async def _introduce(self, line: Line, listener: str, deadline: float, *, is_only_one: bool = True) -> None:
        """Tell the registry what this machine is, and be taken in. LineLost: not yet. ProgramEnd: it is refused."""
        self.line = line
        token = self._rendezvous.token
        facts = self._this_node.facts.now()
        own_nonce = secrets.token_hex(16)
        challenge = await line.receive(silent_s=max(1.0, deadline - time.monotonic()))
        if challenge["kind"] != "challenge":
            raise LineLost("is no ddp_train of this version")
        their_nonce = str(challenge.get("nonce"))
        own_proof = proof(token, by="node", over=their_nonce, own=own_nonce)
        told = replace(facts, run=self.left or facts.run).to_json()
        line.send("hello", name=facts.host, nonce=own_nonce, proof=own_proof, program=self._program, pid=os.getpid(), facts=told)
        welcome = await self._receive_welcome(line, deadline, is_only_one=is_only_one)
        if not is_proven(welcome.get("proof"), proof(token, by="registry", over=own_nonce, own=their_nonce)):
            if not is_only_one:
                raise LineLost("does not know this run's token")
            happened = f"{listener} does not know this run's token; nothing that it sends is run"
            fix = "check which program listens there; use the same cluster.rendezvous_id on all machines, or another port"
            self._end(str(UserError(key="cluster.rendezvous_id", happened=happened, fix=fix)))
        self.first_host = shown(welcome["first"])
        self.has_joined = True
        if not self._rendezvous.is_first and welcome.get("folder"):
            print(f"joined {shown(welcome['folder'])}, whose first machine is {self.first_host}", file=sys.stderr, flush=True)
        line.beat()
        for index, number in enumerate(self._stops):
            line.send("stop", signal=number, is_final=is_final_stop(number, self._stops[:index]))

    async def _receive_welcome(self, line: Line, deadline: float, *, is_only_one: bool) -> JsonMessage:
        """Answer what the registry asks before it takes this machine in. LineLost: of another run. ProgramEnd: it is refused."""
        while (message := await line.receive(silent_s=max(1.0, deadline - time.monotonic())))["kind"] != "welcome":
            if message["kind"] == "say":
                print(shown(message.get("text")), file=sys.stderr, flush=True)
            elif message["kind"] == "look":
                line.send("seen", sees=await _sees(str(message.get("folder", ""))), utc=time.time())
            elif message["kind"] == "refused":
                if message.get("is_foreign") and not is_only_one:
                    raise LineLost("is of another run")
                head = f"{message.get('first')} refuses this machine, {self._this_node.facts.host}:"
                self._end(shown("\n  ".join([head, *map(str, message.get("reasons", []))])))
        return message

    @staticmethod
    def _end(text: str, code: int = ENVIRONMENT_REFUSES) -> NoReturn:
        print(f"\n{text}", file=sys.stderr, flush=True)
        raise ProgramEnd(code)


async def _sees(folder: str) -> bool:
    """Tell whether this machine sees the run's folder; "" is none. A network file system may show a new one some seconds late."""
    deadline = time.monotonic() + _SEES_WITHIN_S
    while not (is_there := not folder or os.path.isdir(folder)) and time.monotonic() < deadline:
        await asyncio.sleep(_RETRY_S)
        with suppress(OSError):
            refresh(Path(folder).parent)
    return is_there
