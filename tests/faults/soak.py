"""Minutes under fire: one random fault after another on a real run, which must get on, and compute what an undisturbed run computes.

    python -m tests.faults.soak --minutes=10 --every=20 --ranks=3 --seed=1 --report=soak.md

First the same run undisturbed for as long. Goodput is the steps that the run under faults has taken when the time is up, divided by those
of the undisturbed one. Wrong is: a number in metrics.jsonl that differs in any bit, a step that is there twice or not at all, a process
that is left, an exit code that nobody expects, and a run that does not complete when the faults are over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddp_train.rank.fault_injection import ROOM_BYTES, damage, limit_space
from tests.conftest import our_processes
from tests.distributed.test_failure import children
from tests.faults import obeying

GOODPUT = 0.6
_HANGS = ("stop", "gil", "loop", "sleep", "deadlock")
_STEP_TIMEOUT_S = 5
_NUMBERS = ("split", "step", "samples", "epoch", "loss", "lr", "grad_norm", "accuracy", "accuracy_top5")
_SPACE_S = 4.0  # how long the disk stays full
_STUCK_S = 120.0
_ORPHANS_S = 3.0  # how long processes may take to end after the one that was typed


@dataclass
class Fault:
    """One fault that was done."""

    kind: str
    at_s: float  # since the run's first start
    steps: int  # taken until then
    exit_codes: list[int] = field(default_factory=list)  # of the command, before the next fault


class Run:
    """One run, and the user in front of it, who types the same command again whenever it ends too early."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder, self.root, self._command = folder, folder / "run", command
        self.process: subprocess.Popen[bytes] | None = None
        self.wrong: list[str] = []

    def start(self) -> None:
        output = (self.folder / "output.txt").open("ab")
        self.process = subprocess.Popen(
            self._command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output.close()

    def ended(self) -> int | None:
        """Return the exit code of the command when it has just ended, after looking for processes that it left."""
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        deadline = time.monotonic() + _ORPHANS_S
        while (left := our_processes(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.wrong.append(f"{len(left)} processes were left {_ORPHANS_S:g} s after the command had ended with {code}")
        self.process = None
        return code

    def ranks(self) -> list[int]:
        """Return the pids of the ranks that run now."""
        with suppress(OSError):
            if self.process is not None:
                return [pid for agent in children(self.process.pid) for pid in children(agent)]
        return []

    def step(self) -> int:
        """Return the last step that was written."""
        with suppress(OSError, ValueError, IndexError, KeyError), (self.root / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["step"])
        return 0

    def numbers(self) -> list[dict[str, Any]]:
        """Return what was computed, without what depends on the clock."""
        records = map(json.loads, (self.root / "metrics.jsonl").read_text().splitlines())
        return [{name: record[name] for name in _NUMBERS if name in record} for record in records]


class Attacker:
    """Does random faults to a run."""

    def __init__(self, run: Run, random_numbers: random.Random) -> None:
        self._run, self._random = run, random_numbers
        self._without_space: list[int] = []
        self._space_again = 0.0
        self.faults: dict[str, Callable[[], bool]] = {
            "kill of a rank": lambda: self._signal_rank(signal.SIGKILL),
            "segfault of a rank": lambda: self._signal_rank(signal.SIGSEGV),
            "exception in a rank": lambda: self._order("exception"),
            "exit 0 of a rank": lambda: self._order("exit"),
            "kill of a loader worker": self._kill_worker,
            "kill of the agent": lambda: self._signal(self._agent(), signal.SIGKILL),
            "kill of the launcher": lambda: self._signal(self._launcher(), signal.SIGKILL),
            "SIGTERM to the launcher": lambda: self._signal(self._launcher(), signal.SIGTERM),
            "SIGUSR1 to a rank": lambda: self._signal_rank(signal.SIGUSR1),
            "newest checkpoint truncated, kill": lambda: self._damage("truncate"),
            "newest checkpoint flipped, kill": lambda: self._damage("bit_flip"),
            "disk full for a while": self._fill_disk,
        }
        self.faults |= {f"hang of a rank ({kind})": lambda kind=kind: self._order(kind) for kind in _HANGS}

    def strike(self, kind: str) -> bool:
        """Do a fault; False: there is nothing yet to do it to."""
        return self.faults[kind]()

    def tidy(self, *, at_once: bool = False) -> None:
        """End the disk's being full when its time is over."""
        if self._without_space and (at_once or time.monotonic() > self._space_again):
            for pid in self._without_space:
                with suppress(OSError):
                    limit_space(pid, None)
            self._without_space = []

    def _launcher(self) -> int | None:
        return self._run.process.pid if self._run.process is not None else None

    def _agent(self) -> int | None:
        with suppress(OSError):
            return next(iter(children(self._launcher() or 0)), None)
        return None

    def _signal(self, pid: int | None, number: signal.Signals) -> bool:
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def _signal_rank(self, number: signal.Signals) -> bool:
        ranks = self._run.ranks()
        return bool(ranks) and self._signal(self._random.choice(ranks), number)

    def _order(self, kind: str) -> bool:
        ranks = self._run.ranks()
        if ranks:
            obeying.give(kind, rank=self._random.randrange(len(ranks)), folder=self._run.folder)
        return bool(ranks)

    def _kill_worker(self) -> bool:
        workers = []
        with suppress(OSError):  # ranks fork their workers from a server
            workers = [worker for rank in self._run.ranks() for helper in children(rank) for worker in children(helper)]
        return bool(workers) and self._signal(self._random.choice(workers), signal.SIGKILL)

    def _damage(self, kind: str) -> bool:
        if not self._run.ranks() or not any((self._run.root / "checkpoints").glob("step_*")):
            return False
        with suppress(FileNotFoundError):  # it has just been removed, and a newer one is there
            damage(self._run.root / "checkpoints", kind)
        return self._signal_rank(signal.SIGKILL)

    def _fill_disk(self) -> bool:
        self._without_space = self._run.ranks()
        self._space_again = time.monotonic() + _SPACE_S
        for pid in self._without_space:
            with suppress(OSError):
                limit_space(pid, ROOM_BYTES)
        return bool(self._without_space)


def command_of(arguments: argparse.Namespace, *, max_steps: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "ddp_train",
        "hydra.run.dir=run",
        "name=soak",
        "model=convnet",
        "model._target_=obeying.Obeying",
    ]
    command += ["model.width=8", "model.dropout=0.1", "data.num_samples=20000", "data.eval.num_samples=500", "loader.num_workers=1"]
    command += ["loader.micro_batch_size=64", "scheduler=constant", f"seed={arguments.seed}", "~metrics.tensorboard"]
    command += ["sanity_check=false"]  # an order that is met there would be a mistake of the model, and end the run with 2
    command += [
        f"trainer.max_steps={max_steps}",
        "trainer.max_epochs=null",
        "trainer.log_every_steps=1",
        "evaluation.every_steps=500",
    ]
    command += [f"checkpoint.every_steps={arguments.checkpoint_every}", "cluster=cpu", f"cluster.processes_per_node={arguments.ranks}"]
    command += ["cluster.threads_per_process=1", "cluster.max_restarts=1000"]
    return [*command, f"cluster.step_timeout_s={_STEP_TIMEOUT_S}"]


def undisturbed(run: Run, seconds: float) -> int:
    """Run for a while, stop in good order, and return the steps that were taken in that time."""
    run.start()
    time.sleep(seconds)
    steps = run.step()
    assert run.process is not None
    run.process.terminate()
    code = run.process.wait(timeout=120)
    if code != 75:
        run.wrong.append(f"the undisturbed run was stopped and ended with {code} instead of 75")
    return steps


def under_fire(run: Run, attacker: Attacker, *, seconds: float, every_s: float, random_numbers: random.Random) -> tuple[int, list[Fault]]:
    """Run for as long under faults; return the steps taken when the time is up, and the faults."""
    started, done = time.monotonic(), []
    kinds: list[str] = []
    due = every_s
    farthest = 0
    run.start()
    while (elapsed := time.monotonic() - started) < seconds:
        if not kinds:  # each once, in random order, and again
            kinds = random_numbers.sample(sorted(attacker.faults), len(attacker.faults))
        farthest = max(farthest, run.step())
        kind = next((kind for kind in kinds if attacker.strike(kind)), None) if elapsed >= due else None  # not all can be done at any time
        if kind is not None:
            kinds.remove(kind)
            done.append(Fault(kind, elapsed, farthest))
            print(f"{elapsed:6.1f} s  step {farthest:6d}  {kind}", flush=True)
            due = elapsed + every_s
        attacker.tidy()
        _go_on(run, done)
        time.sleep(0.1)
    attacker.tidy(at_once=True)
    return max(farthest, run.step()), done


def to_its_end(run: Run, done: list[Fault]) -> None:
    """Let the run complete now that nothing happens to it."""
    moved, step = time.monotonic(), run.step()
    while time.monotonic() < moved + _STUCK_S:
        if run.process is None or _go_on(run, done) == 0:
            return
        if run.step() != step:
            moved, step = time.monotonic(), run.step()
        time.sleep(0.1)
    run.wrong.append(f"it was not completed after the last fault: no step in {_STUCK_S:.0f} s")
    if run.process is not None:
        run.process.kill()
        run.ended()


def _go_on(run: Run, done: list[Fault]) -> int | None:
    """Type the command again when it has ended too early; return its exit code when it has just ended."""
    code = run.ended()
    if code is not None:
        if done:
            done[-1].exit_codes.append(code)
        if code not in (0, 1, 75, -signal.SIGKILL, 128 + signal.SIGKILL, 143):
            run.wrong.append(f"the command ended with {code}, after {done[-1].kind if done else 'nothing'}")
        if code != 0:
            run.start()
    return code


def compare(run: Run, reference: Run) -> None:
    """Note every difference in what was computed: in steps that both have."""
    ours, theirs = run.numbers(), reference.numbers()
    steps = [record["step"] for record in ours if record["split"] == "train"]
    if steps != list(range(1, len(steps) + 1)):
        run.wrong.append("metrics.jsonl has a step twice or not at all")
    expected = {(record["split"], record["step"]): record for record in theirs}
    different = [each for each in ours if expected.get((each["split"], each["step"]), each) != each]
    if different:
        run.wrong.append(f"{len(different)} records differ from the undisturbed run's, the first one: {different[0]}")
    if not ours:
        run.wrong.append("nothing was computed")


def report(arguments: argparse.Namespace, run: Run, reference: Run, done: list[Fault], *, steps: int, of: int) -> str:
    goodput, seconds = steps / max(1, of), 60 * arguments.minutes
    lost: dict[str, list[float]] = {}
    for fault, following in zip(done, [*done[1:], Fault("", seconds, steps)], strict=True):
        gone = following.at_s - fault.at_s - (following.steps - fault.steps) / of * seconds
        lost.setdefault(fault.kind, []).append(gone)
    lines = [
        f"`python -m tests.faults.soak --minutes={arguments.minutes:g} --every={arguments.every:g} --ranks={arguments.ranks}"
        f" --seed={arguments.seed}`, torch {torch.__version__}, {os.cpu_count()} cores",
        "",
        f"- undisturbed: {of} steps in {arguments.minutes:g} minutes ({of / arguments.minutes / 60:.1f} a second), a checkpoint every"
        f" {arguments.checkpoint_every} steps",
        f"- under {len(done)} faults: {steps} steps, **goodput {goodput:.0%}** (goal {GOODPUT:.0%})",
        f"- wrong results: {len(run.wrong + reference.wrong) or 'none'}; {len(run.numbers())} records of metrics.jsonl are compared",
        *(f"  - {text}" for text in run.wrong + reference.wrong),
    ]
    lines += ["", "| fault | times | exit codes of the command | seconds lost, median (most) |", "|---|---|---|---|"]
    for kind, each in sorted(lost.items()):
        codes = sorted({str(code) for fault in done if fault.kind == kind for code in fault.exit_codes if code != 0})
        lines.append(f"| {kind} | {len(each)} | {', '.join(codes) or 'goes on'} | {statistics.median(each):.1f} ({max(each):.1f}) |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="a real run under one random fault after another")
    parser.add_argument("--minutes", type=float, default=10.0, help="under faults, and as long undisturbed before")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of the run")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps between two checkpoints")
    parser.add_argument("--report", type=Path, help="a file for the report, which is printed in any case")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    for name in ("whole", "soak"):
        (folder / name).mkdir()
        shutil.copy(obeying.__file__, folder / name)
    reference = Run(folder / "whole", command_of(arguments, max_steps=10_000_000))
    of = undisturbed(reference, 60 * arguments.minutes)
    last = reference.step()
    print(f"undisturbed: {of} steps", flush=True)
    run = Run(folder / "soak", command_of(arguments, max_steps=last))
    random_numbers = random.Random(arguments.seed)
    attacker = Attacker(run, random_numbers)
    steps, done = under_fire(run, attacker, seconds=60 * arguments.minutes, every_s=arguments.every, random_numbers=random_numbers)
    to_its_end(run, done)
    compare(run, reference)
    text = report(arguments, run, reference, done, steps=steps, of=of)
    print(f"\n{text}")
    if arguments.report is not None:
        arguments.report.write_text(text)
    is_good = not run.wrong and not reference.wrong and steps >= GOODPUT * of
    if is_good:
        shutil.rmtree(folder)
    else:
        print(f"everything is kept in {folder}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
