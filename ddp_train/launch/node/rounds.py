"""The rounds of a run over several machines. A round is one start of all ranks, and only the first machine says when one begins and ends.

    gather machines -> a round -> it was completed, or stopped                -> the end
                         ^     -> a rank or a machine was lost: one restart   -> again, or the end
                         |     -> a machine has come: all save and end        -> again, which costs no restart
                         +----------------------------------------------------------------+

Everything that is counted is counted here, once for all machines.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field

from ddp_train.errors import DONE, FAILED, FINAL, INTERRUPTED, NO_PROGRESS, PREEMPTED, TERMINATED, ConfigError, EnvironmentRefuses
from ddp_train.launch.node.registry import Event, Machine, Registry
from ddp_train.launch.node.slot import NodeSlot, Work, listen, with_world_size
from ddp_train.run_folder import failure
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import check_progress
from ddp_train.run_folder.verdict import exit_code
from ddp_train.system.process import STOP_SIGNALS

_LAST_CALL_S = 2.0  # how long an elastic run that has machines enough waits for one more
_NAMED_AFTER_S, _NAMED_EVERY_S = 4.0, 30.0  # who is missing: after the start and after each that comes, and then again
_TELLS_S = 5.0  # how long the others may come to hear what is wrong with the first machine
_SURVIVORS_S = 4.0  # what the agents of other machines have after a failure, to say what their ranks died of
_MARGIN_S = 15.0  # in addition to cluster.grace_s, before agents that were told to stop are killed
_DIES_WITHIN_S = 10.0  # an agent that was killed
_POLL_S = 0.1
_ABOUT_TO_BE_LOST_S = 4.0  # a machine that is silent for so long when another one is lost
_TOLD = tuple(128 + number for number in STOP_SIGNALS)  # what an agent ends with that was told to


@dataclass
class _Round:
    """One start of all ranks."""

    number: int
    machines: list[Machine]
    codes: dict[Machine, int] = field(default_factory=dict)  # how the agents ended
    lost: list[Machine] = field(default_factory=list)
    ending: str = ""  # why it was told to end: stop | join | failed
    kill_at: float = float("inf")
    is_killed: bool = False
    is_cut_off: bool = False  # it is this machine that was lost, and not the others

    @property
    def open(self) -> list[Machine]:
        return [machine for machine in self.machines if machine not in self.codes and machine not in self.lost]

    def end(self, why: str, *, within_s: float) -> None:
        if self.ending != "failed":
            self.ending = why
        self.kill_at = min(self.kill_at, time.monotonic() + within_s)

    def ranks_of(self, machine: Machine) -> range:
        first = sum(each.processes for each in self.machines[: self.machines.index(machine)])
        return range(first, first + machine.processes)


class Rounds:
    """Begins rounds until the run has ended (the first machine). Made and used in one event loop."""

    def __init__(self, registry: Registry, work: Work, slot: NodeSlot) -> None:
        self._registry, self._work, self._slot = registry, work, slot
        self._job = work.job
        self.before = None if work.run_folder is None else work.run_folder.read_result()
        self._restarts = self._number = 0
        self._stop: int | None = None  # the first signal that asked for it
        self._is_final = False  # a second stop signal came
        self.listener: socket.socket | None = None  # where the first machine's agent is to serve the next round's store

    async def run(self) -> int:
        """Return the exit code of the run."""
        while True:
            found = await self._gather()
            if isinstance(found, int):
                return found
            try:
                this = self._begin(found)
            except ConfigError as error:
                self._registry.say(f"\n{error}")
                return error.exit_code
            await self._watch(this)
            code = self._judge(this)
            if code is not None:
                return code

    async def _gather(self) -> list[Machine] | int:
        """Wait for machines enough, and return them; or the exit code where they do not come."""
        registry, slot, began = self._registry, self._slot, time.monotonic()
        say_at, enough_since = began + _NAMED_AFTER_S, None
        problems = [] if registry.takes_all else self._work.facts.problems
        for problem in problems:
            print(f"{problem}, on {self._work.facts.host}, the first machine", file=sys.stderr, flush=True)
        while True:
            now = time.monotonic()
            if self._stop is not None:
                return self._stopped()
            if problems and now > began + _TELLS_S:
                return self._refuse("\n".join(problems))
            if slot.is_given and not slot.is_elastic and registry.refusal:
                return self._refuse(registry.refusal)
            count = len(registry.machines)
            enough_since = None if count < slot.least else enough_since or now
            is_called = count == slot.most or (enough_since is not None and (self._number > 0 or now > enough_since + _LAST_CALL_S))
            if is_called and not problems and all(machine.is_fresh for machine in registry.machines):
                return list(registry.machines)
            if now > began + self._work.cluster.join_timeout_s and count < slot.least:
                return self._too_few()
            if now > say_at and count < slot.least:
                say_at = now + _NAMED_EVERY_S
                registry.say(f"waiting: {registry.missing()}")
            if (event := await self._event()) is not None:
                self._hear_of_a_stop(event)
                say_at = min(say_at, time.monotonic() + _NAMED_AFTER_S) if event.kind == "came" else say_at

    def _begin(self, machines: list[Machine]) -> _Round:
        self._number += 1
        world_size = sum(machine.processes for machine in machines)
        if self._job is not None:
            self._job = with_world_size(self._job, world_size)
        # One interface, where all others have found us at it; TCP to several addresses of ours at once is rare.
        reached = {machine.reached for machine in machines if not machine.is_first}
        if self.listener is not None:  # of a round in which our own agent never began
            self.listener.close()
        self.listener = listen(reached.pop() if len(reached) == 1 else "" if reached else "127.0.0.1", 0)
        name = uuid.uuid4().hex
        for rank, machine in enumerate(machines):
            machine.line.send(
                "round",
                number=self._number,
                name=name,
                rank=rank,
                nodes=len(machines),
                port=self.listener.getsockname()[1],
                restarts=self._restarts,
                max_restarts=self._work.max_restarts,
                first_ranks=machines[0].processes,
                job=None if self._job is None else self._job.to_json(),
            )
        return _Round(self._number, machines)

    async def _watch(self, this: _Round) -> None:
        """Wait until the agents of all machines have ended, and end them where that has to be."""
        while this.open:
            event = await self._event()
            now = time.monotonic()
            if event is not None:
                self._hear(event, this)
            if self._stop is not None and this.ending not in ("stop", "failed"):
                this.end("stop", within_s=self._work.cluster.grace_s + _MARGIN_S)
            if self._is_final:
                this.kill_at = min(this.kill_at, now)
            if now >= this.kill_at + _DIES_WITHIN_S:
                for machine in this.open:
                    self._registry.drop(machine, "has an agent that does not end")
            elif now >= this.kill_at and not this.is_killed:
                this.is_killed = True
                for machine in this.open:
                    machine.line.send("kill", round=this.number)

    def _hear(self, event: Event, this: _Round) -> None:
        machine, message = event.machine, event.message
        self._hear_of_a_stop(event)
        if event.kind == "ended" and message["round"] == this.number and machine in this.open:
            is_ours = this.is_killed and message["code"] == 128 + signal.SIGKILL
            this.codes[machine] = FAILED if is_ours else message["code"]
            if message["code"] != DONE and not this.ending:
                this.end("failed", within_s=_SURVIVORS_S)
                if message.get("why"):
                    self._registry.say(f"{machine.name}: {message['why']}")
        elif event.kind == "lost" and machine in this.open:
            this.lost.append(machine)
            self._report_loss(machine, message["why"], this)
            this.end("failed", within_s=0.0)
        elif event.kind == "came" and not this.ending and machine not in this.machines and machine in self._registry.machines:
            self._registry.say(f"{machine.name} has come: the run saves, and goes on with {len(self._registry.machines)} machines")
            this.end("join", within_s=self._work.cluster.grace_s + _MARGIN_S)
            for each in this.open:
                each.line.send("stop", signal=int(signal.SIGTERM))

    def _hear_of_a_stop(self, event: Event) -> None:
        """Pass a stop signal that came to one machine on to all."""
        if event.kind != "stop":
            return
        number = event.message["signal"]
        self._is_final = self._is_final or event.message["is_final"]
        if self._stop is None:
            self._stop = number
            self._registry.say(f"{signal.Signals(number).name} on {event.machine.name}: all machines save and end")
            for machine in self._registry.machines:
                if machine is not event.machine:
                    machine.line.send("stop", signal=number)
        elif number == signal.SIGINT:
            self._stop = number  # a Ctrl-C counts more than the batch system's warning before it

    def _report_loss(self, machine: Machine, why: str, this: _Round) -> None:
        """Name a machine that was lost, before ranks that have lost it can name each other."""
        others = [each for each in this.machines if not each.is_first and each not in this.lost]
        if this.is_cut_off:
            return
        is_our_cable = this.is_cut_off = bool(others) and all(each.line.silent_s > _ABOUT_TO_BE_LOST_S for each in others)
        if is_our_cable:
            why = f"cannot reach any other machine ({', '.join(each.name for each in (machine, *others))})"
            machine = this.machines[0]
        found = failure.from_machine(host=machine.name, ranks=this.ranks_of(machine), why=why)
        folder = self._work.run_folder
        is_last = self._stop is not None or self._restarts >= self._work.max_restarts
        if folder is not None and failure.ended_since(folder, self.before) is None and found.record(folder) and is_last:
            print(found.screen(folder), file=sys.stderr, flush=True)
        self._registry.say(f"{found.message}; the ranks of all machines are ended")

    def _judge(self, this: _Round) -> int | None:
        """Return the exit code of the run, or None where a round is to follow."""
        folder, expected = self._work.run_folder, (DONE, *(_TOLD if this.ending in ("join", "stop") else ()))
        bad = [code for code in this.codes.values() if code not in expected]
        code = next((code for code in bad if code in FINAL), max(FAILED, bad[0]) if bad else DONE)
        result = None if folder is None else folder.read_result()
        is_ended = folder is not None and failure.ended_since(folder, self.before) is not None
        if self._stop is not None:
            return self._stopped()
        is_failed = not is_ended and bool(this.lost or bad)
        if this.ending == "join" and not is_failed and not (result is not None and result.status == Status.COMPLETED):
            if folder is not None:
                folder.forget_failure()  # it says `preempted`
            return None
        if not is_failed:
            return DONE if folder is None else exit_code(folder, code, before=self.before)
        code = code or FAILED
        if code in FINAL:
            return code
        if folder is not None and (problem := check_progress(folder, has_failed=True)):
            self._registry.say(problem)
            return NO_PROGRESS
        if self._restarts >= self._work.max_restarts or any(machine.is_first for machine in this.lost):  # without it no machine leads
            found = None if folder is None else failure.load(folder.failure)
            where = "" if found is None or folder is None else f": {found.who}: {found.line(200)}; {folder.shown()}/{folder.failure.name}"
            self._registry.say(f"the run has failed{where}")
            return code
        self._restarts += 1
        return None

    def _stopped(self) -> int:
        code = INTERRUPTED if self._stop == signal.SIGINT else TERMINATED
        if self._work.run_folder is None:
            return PREEMPTED if code == TERMINATED else code
        return exit_code(self._work.run_folder, code, before=self.before)

    def _refuse(self, why: str) -> int:
        """Say in the run's folder that it cannot run on these machines, and return the exit code."""
        error = EnvironmentRefuses(happened=why, expected="machines that agree with the first one")
        if self._work.run_folder is not None:
            failure.from_exception(error, rank=0, step=None).record(self._work.run_folder)
        return error.exit_code

    def _too_few(self) -> int:
        within_s = self._work.cluster.join_timeout_s
        happened = f"fewer than {self._slot.least} machines came in {within_s} s: {self._registry.missing()}"
        fix = "start the run there too, or a longer cluster.join_timeout_s for machines that start late"
        error = ConfigError(key="cluster.join_timeout_s", happened=happened, expected="the same command on every machine", fix=fix)
        self._registry.say(f"\n{error}")
        return self._refuse(error.happened) if self._number == 0 else FAILED

    async def _event(self) -> Event | None:
        """Return what happens next, or None after a moment in which nothing does."""
        try:
            async with asyncio.timeout(_POLL_S):
                return await self._registry.events.get()
        except TimeoutError:
            return None
