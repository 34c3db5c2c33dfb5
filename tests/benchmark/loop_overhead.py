"""What the loop costs: ours, with its defaults on, against a hand-written best-practice DDP loop.

    python tests/benchmark/loop_overhead.py [--pairs 40] [--workloads mlp gpt gpt2] [--processes 1 2] [--device cuda] [--operations]

Both train the same model from the same weights on the same batches with the same fused AdamW and the same cosine schedule. They take
turns inside one process (group), a few dozen steps each, and each pair of turns gives one ratio; the table has the medians. Wall time
and CPU time per step are measured, the second because shared machines are noisy. That both end with the same weights is checked.

The hand-written loop: data in memory indexed by a precomputed order, no_sync-free steps (no accumulation), gradient_as_bucket_view,
set_to_none, fused optimizer, one host sync a turn for the loss. Ours: everything that a user gets who changes nothing:
permuted order, weights of the loss, schedule, gradient norm at log steps, console, metrics.jsonl and TensorBoard. The checkpoint at a
run's end is no part of a step and is left out. With `--operations` the last turn of each is profiled, and the operations are listed whose
time differs most: the device's where there is one, else the host's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, supported_activities

from ddp_train import CONF
from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, alone, open_world
from ddp_train.interfaces import Batch, Indices
from ddp_train.interfaces.run import WriterFacts
from ddp_train.loader.order import SampleOrder
from ddp_train.loader.sampler import Shuffled
from ddp_train.system.phase import Phases
from ddp_train.system.process import exit_at_once
from ddp_train.training.build.build import build
from ddp_train.training.build.make import make_writers
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import TrainState
from tests.unit.parts import services

HERE = "tests.benchmark.loop_overhead"
WARM_UP_PAIRS = 3


class Vectors:
    """Classified vectors in memory: the cheapest data there is, so that the loop shows."""

    def __init__(self, num_samples: int, width: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, width, generator=generator)
        self.targets = torch.randint(10, (num_samples,), generator=generator)

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"num_classes": 10}

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Indices) -> Batch:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


class Tokens:
    """Windows of random tokens, as char_text gives them."""

    def __init__(self, num_samples: int, *, context_length: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(65, (num_samples, context_length + 1), generator=generator)
        self.inputs, self.targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        self._context_length = context_length

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab_size": 65, "context_length": self._context_length}

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Indices) -> Batch:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


class Perceptron(nn.Sequential):
    """64-256-256-256-10: a step of about a millisecond."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
        super().__init__(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))


@dataclass(frozen=True)
class Workload:
    """A model and its data, as overrides for us and as a loss for the hand-written loop."""

    overrides: list[str]
    log_every_steps: int  # and the length of a turn
    micro_batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKLOADS = {
    "mlp": Workload(
        [
            *[f"data._target_={HERE}.Vectors", f"model._target_={HERE}.Perceptron", "~model.image_shape", "~model.num_classes"],
            *["~model.width", "~model.dropout", "amp=off"],
        ],
        log_every_steps=50,
        micro_batch_size=64,
        loss=F.cross_entropy,
    ),
    "gpt": Workload(  # nanoGPT's CPU setting
        [
            *[f"data._target_={HERE}.Tokens", "model=gpt", "objective=language_modeling", "amp=off"],
            *["model.num_layers=4", "model.num_heads=4", "model.width=128", "model.bias=false"],
        ],
        log_every_steps=10,
        micro_batch_size=12,
        loss=token_loss,
    ),
    "gpt2": Workload(  # GPT-2 124M and nanoGPT's micro-batch for it, for a GPU
        [
            *[f"data._target_={HERE}.Tokens", "+data.context_length=1024", "model=gpt", "objective=language_modeling", "amp=bf16"],
            *["model.num_layers=12", "model.num_heads=12", "model.width=768", "model.bias=false", "model.vocab_size=50304"],
        ],
        log_every_steps=10,
        micro_batch_size=12,
        loss=token_loss,
    ),
}


def main() -> None:
    """Start the processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), help="default: mlp gpt, and on cuda gpt2")
    parser.add_argument("--processes", nargs="+", type=int, help="default: 1 and 2; on cuda 1 and as many as there are GPUs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--operations", action="store_true", help="list the operations whose time differs most")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads or ["mlp", "gpt", *(["gpt2"] if arguments.device == "cuda" else [])]
    if "RANK" in os.environ:
        for name in arguments.workloads:
            measure(name, arguments.pairs, arguments.device, lists_operations=arguments.operations)
        exit_at_once(0)
    print(f"torch {torch.__version__}, {arguments.device}, {os.cpu_count()} cores, {arguments.pairs} pairs; ratio = ours / hand-written")
    print("| workload | processes | raw ms/step | ours ms/step | wall ratio | CPU ratio |\n|---|---|---|---|---|---|")
    for processes in arguments.processes or sorted({1, torch.cuda.device_count() if arguments.device == "cuda" else 2}):
        for line in launch(processes, arguments):
            print(line, flush=True)


def launch(processes: int, arguments: argparse.Namespace) -> list[str]:
    """Run all workloads in one torchrun and return their rows."""
    threads = max(1, (os.cpu_count() or 1) // processes) if processes > 1 else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", HERE]
    command += ["--pairs", str(arguments.pairs), "--device", arguments.device, "--workloads", *arguments.workloads]
    command += ["--operations"] if arguments.operations else []
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in done.stdout.splitlines() if line.startswith("operation ")] + [
        f"| {row['workload']} | {processes} | {row['raw_ms']:.3f} | {row['ours_ms']:.3f} | {spread(row, 'wall')} | {spread(row, 'cpu')} |"
        for row in rows
    ]


def spread(row: dict[str, Any], clock: str) -> str:
    """Return a median and its quartiles."""
    low, high = row[f"{clock}_quartiles"]
    return f"{row[clock]:.3f} ({low:.3f} to {high:.3f})"


_world: World | None = None


def measure(name: str, pairs: int, device: str, *, lists_operations: bool = False) -> None:
    """Train both side by side, and print the medians of the paired ratios as JSON (rank 0)."""
    global _world
    workload = WORKLOADS[name]
    if _world is None:
        _world = open_world(join_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device=device)
    world = _world
    checked = configured(workload, steps=(pairs + WARM_UP_PAIRS) * workload.log_every_steps, device=device)
    components = build(checked, world)
    raw = HandWritten(checked, workload, world)
    raw_times: list[tuple[float, float]] = []
    our_times: list[tuple[float, float]] = []
    clock = [now(world)]
    profiles = {side: profile(activities=supported_activities()) for side in ("ours", "raw")} if lists_operations else {}

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        facts = WriterFacts(
            run_dir=folder,
            config=checked.tree,
            hyper_parameters={},
            phases=Phases(),
            step=0,
            epoch=0.0,
            total_steps=components.total_steps,
            steps_per_epoch=components.train_loader.order.steps_per_epoch,
        )
        writers = make_writers(checked.metrics, facts) if world.is_main else []

        def write(record: Record) -> None:
            """Write as always; then it is the hand-written loop's turn."""
            for writer in writers:
                writer.write(record)
            our_times.append(since(clock[0], world))
            is_profiled = bool(profiles) and len(our_times) == pairs + WARM_UP_PAIRS - 1  # the last turns
            if profiles and len(our_times) == pairs + WARM_UP_PAIRS:
                profiles["ours"].stop()
            before = now(world)
            with profiles["raw"] if is_profiled else nullcontext():
                raw.steps(workload.log_every_steps)
            raw_times.append(since(before, world))
            if is_profiled:
                profiles["ours"].start()
            clock[0] = now(world)

        trainer = build_trainer(checked, components, TrainState(), world, services(write=write))
        clock[0] = now(world)
        trainer.train()
        for writer in writers:
            writer.close()
    if not math.isclose(norm(components.model), norm(raw.model), rel_tol=1e-4):
        raise AssertionError(f"the two loops ended with other weights: {norm(components.model)} and {norm(raw.model)}")
    if world.is_main and profiles:
        list_operations(profiles["raw"], profiles["ours"], workload.log_every_steps)
    if world.is_main:
        kept = list(zip(raw_times, our_times, strict=True))[WARM_UP_PAIRS:]
        row: dict[str, Any] = {"workload": name}
        for place, clock_name in enumerate(("wall", "cpu")):
            ratios = sorted(ours[place] / theirs[place] for theirs, ours in kept)
            row[clock_name] = statistics.median(ratios)
            row[f"{clock_name}_quartiles"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
        for side, title in ((0, "raw_ms"), (1, "ours_ms")):
            row[title] = 1e3 * statistics.median(pair[side][0] for pair in kept) / workload.log_every_steps
        print(json.dumps(row), flush=True)


def list_operations(raw: profile, ours: profile, steps: int) -> None:
    """Print the operations whose own time in a step differs most, in milliseconds, and how often each runs."""
    times: dict[str, list[tuple[float, float]]] = {}
    for side, profiled in enumerate((raw, ours)):
        for event in profiled.key_averages():
            spent = event.self_device_time_total if torch.cuda.is_available() else event.self_cpu_time_total
            times.setdefault(event.key, [(0.0, 0.0), (0.0, 0.0)])[side] = (spent / 1e3 / steps, event.count / steps)
    times["in all: the rest of a step nothing ran"] = [
        (sum(sides[side][0] for sides in times.values()), sum(sides[side][1] for sides in times.values())) for side in (0, 1)
    ]
    for name, (theirs, own) in sorted(times.items(), key=lambda item: -abs(item[1][1][0] - item[1][0][0]))[:12]:
        print(f"operation {name[:70]}: raw {theirs[0]:.3f} ms, {theirs[1]:.1f} times; ours {own[0]:.3f} ms, {own[1]:.1f} times", flush=True)


def configured(workload: Workload, *, steps: int, device: str) -> RunConfig:
    """Compose the configuration as a user would, with the defaults on."""
    num_samples = steps * workload.micro_batch_size * int(os.environ.get("WORLD_SIZE", "1"))  # one epoch: no sample comes twice
    of_the_default_data = ["split", "image_size", "channels", "noise", "seed", "eval", "num_classes"]
    overrides = [
        *workload.overrides,
        *[f"~data.{name}" for name in of_the_default_data],
        f"data.num_samples={num_samples}",
        *[f"loader.micro_batch_size={workload.micro_batch_size}", f"trainer.max_steps={steps}", "trainer.max_epochs=null"],
        *[f"trainer.log_every_steps={workload.log_every_steps}", f"cluster.device={device}"],
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return check_config(compose("config", overrides))


class HandWritten:
    """The loop as a careful person writes it."""

    def __init__(self, checked: RunConfig, workload: Workload, world: World) -> None:
        parts = build(checked, alone(world.device.type))  # the same weights and optimizer, not yet inside a DDP
        self.model, self.optimizer, self.loss = parts.model, parts.optimizer, workload.loss
        self.peak, self.total_steps, self.step = checked.optimizer["lr"], parts.total_steps, 0
        source = parts.train_loader.source
        self.inputs, self.targets = source.inputs.to(world.device), source.targets.to(world.device)  # type: ignore[attr-defined]
        self.global_batch_size, self.micro_batch_size = checked.batch.global_batch_size, workload.micro_batch_size
        self.first, self.device = world.rank * workload.micro_batch_size, world.device
        dtype = checked.amp["dtype"]
        self.amp = partial(torch.autocast, world.device.type, dtype=getattr(torch, dtype or "bfloat16"), enabled=dtype is not None)
        assert self.total_steps * self.global_batch_size <= len(self.inputs), "the hand-written loop stays inside one epoch"
        order = SampleOrder(Shuffled(len(self.inputs), seed=0), global_batch_size=self.global_batch_size, drop_last=False)
        ids = [order.indices(0, start, min(start + 4096, len(self.inputs))) for start in range(0, len(self.inputs), 4096)]
        self.permutation = torch.from_numpy(np.concatenate(ids)).to(world.device)
        self.ddp: nn.Module = self.model
        if world.size > 1:
            device_ids = [world.device] if world.device.type == "cuda" else None
            self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, device_ids=device_ids)
        self.model.train()

    def steps(self, count: int) -> None:
        """Take some steps and read the loss once."""
        running = torch.zeros((), device=self.device)
        for _ in range(count):
            begin = self.step * self.global_batch_size + self.first
            chosen = self.permutation[begin : begin + self.micro_batch_size]
            with self.amp():
                loss = self.loss(self.ddp(self.inputs[chosen]), self.targets[chosen])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            rate = self.peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / (self.total_steps - 1)))))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            running += loss.detach()
        running.item()


def now(world: World) -> float:
    """Return the wall clock, after the device has done what it was given; CPU time is noted beside it."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    _cpu_noted[0] = time.process_time()
    return time.perf_counter()


def since(before: float, world: World) -> tuple[float, float]:
    """Return wall and CPU seconds since the last `now`."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before, time.process_time() - _cpu_noted[0]


_cpu_noted = [0.0]


def norm(model: nn.Module) -> float:
    """Return the L2 norm of all weights."""
    return float(nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()]))


if __name__ == "__main__":
    main()
