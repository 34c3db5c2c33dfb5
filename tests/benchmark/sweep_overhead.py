"""What a job of a sweep costs beyond its training: from the last step of one job to the first step of the next.

    python tests/benchmark/sweep_overhead.py [--jobs 16] [--rounds 2] [--ways sweep lightning-ddp ...] [--lightning-python PATH]

The gap runs from the end of a job's last step to the end of the next job's first step, less the median time of a step: evaluation,
checkpoint, whatever ends one job and begins the next, and what a first step costs more than a later one. Rank 0 takes the times: ours as
the `time` of the "train" records in metrics.jsonl (trainer.log_every_steps=1), Lightning's module in on_train_batch_end.

Every way trains the same jobs: the default images, a small perceptron, 2 CPU processes of one thread, a few steps, one evaluation and one
checkpoint at the end, TensorBoard. They take turns, a whole sweep each, for some rounds, because shared machines are noisy. Lightning may
have another Python with an environment of its own (torch, lightning, hydra-core, tensorboard); without it, its ways are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from tests.benchmark.machine import processor

ROOT = Path(__file__).parents[2]
PROCESSES = 2
JOB = ["model=mlp", "trainer.max_epochs=null", "trainer.log_every_steps=1"]
OURS = [sys.executable, "-m", "ddp_train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}", "-m", "ddp_train"]
CPU = ["cluster=cpu", f"cluster.processes_per_node={PROCESSES}"]


@dataclass(frozen=True)
class Sweep:
    """What a way has to run, and where."""

    folder: Path  # job k goes to folder/k
    jobs: int
    steps: int

    @property
    def rates(self) -> list[str]:
        """The learning rates of the jobs."""
        return [f"{number / 1000:.3f}" for number in range(1, self.jobs + 1)]

    @property
    def rate_range(self) -> str:
        """The same for Hydra; the half keeps rounding from adding a job."""
        return f"range(0.001,{(self.jobs + 0.5) / 1000:.4f},0.001)"


@dataclass
class Result:
    """What was measured of one way."""

    gaps_s: list[float] = field(default_factory=list)
    sweeps_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def row(self, way: str) -> str:
        """Return its line of the table."""
        low, median, high = statistics.quantiles(self.gaps_s, n=4, method="inclusive")
        sweep, step = statistics.mean(self.sweeps_s), statistics.median(self.step_s)
        return f"| {way} | {median:.2f} | {low:.2f} to {high:.2f} | {sweep:.1f} | {1e3 * step:.0f} |"


def ours(*arguments: str, start: Sequence[str] = OURS) -> Callable[[Sweep], list[list[str]]]:
    """Return a way that is one command with -m."""

    def commands(sweep: Sweep) -> list[list[str]]:
        swept = [f"optimizer.lr={sweep.rate_range}", f"trainer.max_steps={sweep.steps}", f"hydra.sweep.dir={sweep.folder}"]
        return [[*start, "-m", *JOB, *arguments, *swept]]

    return commands


def one_by_one(sweep: Sweep) -> list[list[str]]:
    """A new command for every job, as a shell loop would start them."""
    of_all = [*OURS, *JOB, *CPU, f"trainer.max_steps={sweep.steps}"]
    return [[*of_all, f"optimizer.lr={rate}", f"hydra.run.dir={sweep.folder}/{number}"] for number, rate in enumerate(sweep.rates)]


def with_lightning(strategy: str, python: str) -> Callable[[Sweep], list[list[str]]]:
    """Return Lightning's way: Hydra's basic launcher and one of Lightning's strategies."""

    def commands(sweep: Sweep) -> list[list[str]]:
        swept = [f"model.optimizer.lr={sweep.rate_range}", f"trainer.max_steps={sweep.steps}", f"hydra.sweep.dir={sweep.folder}"]
        return [[python, str(ROOT / "tests/benchmark/lightning_sweep.py"), "-m", f"trainer.strategy={strategy}", *swept]]

    return commands


WAYS: dict[str, tuple[str, Callable[[Sweep], list[list[str]]]]] = {
    "sweep": ("`ddp-train -m`", ours(*CPU)),
    "command": ("a new `ddp-train` for every job", one_by_one),
    "torchrun": ("`torchrun ... -m ddp_train -m`", ours(start=[*TORCHRUN])),
}
LIGHTNING = {f"lightning-{strategy}": strategy for strategy in ("ddp", "ddp_fork", "ddp_spawn")}


def main() -> None:
    """Run all ways in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="of every job")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *LIGHTNING], default=[*WAYS, "lightning-ddp", "lightning-ddp_fork"])
    parser.add_argument("--lightning-python", default=sys.executable, help="a Python that has Lightning")
    arguments = parser.parse_args()
    if arguments.jobs < 3:
        parser.error("--jobs: at least 3, for quartiles of the gaps between them")

    ways = {name: WAYS[name] for name in arguments.ways if name in WAYS}
    versions = f"torch {torch.__version__}"
    if asked := [name for name in arguments.ways if name in LIGHTNING]:
        if version := lightning_version(arguments.lightning_python):
            versions += f", lightning {version}"
            for name in asked:
                title = f"Lightning, Hydra's basic launcher, `{LIGHTNING[name]}`"
                ways[name] = (title, with_lightning(LIGHTNING[name], arguments.lightning_python))
        else:
            print(f"{', '.join(asked)} skipped: {arguments.lightning_python} has no lightning")

    results = {name: Result() for name in ways}
    for number in range(arguments.rounds):
        for name, (_, commands) in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                sweep = Sweep(Path(folder) / "sweep", arguments.jobs, arguments.steps)
                measure(commands(sweep), sweep, results[name])
            print(f"round {number + 1} of {arguments.rounds}, {name}: {results[name].sweeps_s[-1]:.1f} s", file=sys.stderr, flush=True)

    print(f"{processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}; ", end="")
    print(f"{arguments.jobs} jobs of {arguments.steps} steps, {PROCESSES} CPU processes, {arguments.rounds} rounds")
    print("\n| way | gap, median s | quartiles s | whole sweep s | step ms |\n|---|---|---|---|---|")
    for name, (title, _) in ways.items():
        print(results[name].row(title))


def measure(commands: Sequence[Sequence[str]], sweep: Sweep, result: Result) -> None:
    """Run the commands of one sweep one after another, and add what their jobs noted."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(sweep.folder.parent)}
    started = time.perf_counter()
    for command in commands:
        done = subprocess.run(command, cwd=sweep.folder.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    result.sweeps_s.append(time.perf_counter() - started)

    jobs = [ends_of_steps(sweep.folder / str(number)) for number in range(sweep.jobs)]
    assert all(len(job) == sweep.steps for job in jobs), f"not every job noted {sweep.steps} steps"
    step_s = statistics.median(after - before for job in jobs for before, after in pairwise(job))
    result.step_s.append(step_s)
    result.gaps_s += [after[0] - before[-1] - step_s for before, after in pairwise(jobs)]


def ends_of_steps(run: Path) -> list[float]:
    """Return when rank 0 was through with each step of a job, in seconds since 1970."""
    if (run / "stamps.txt").exists():
        return [float(line) for line in (run / "stamps.txt").read_text().splitlines()]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["time"] for record in records if record["split"] == "train"]


def lightning_version(python: str) -> str:
    """Return the version of Lightning that a Python has; "" for none."""
    asked = subprocess.run([python, "-c", "import lightning; print(lightning.__version__)"], capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else ""


if __name__ == "__main__":
    main()
