"""What the order of the samples costs: ours against torch's DistributedSampler.

    python tests/benchmark/order_cost.py [--lengths 1000000 10000000 100000000] [--ours-alone 1000000000 1000000000000] [--repeats 3]

Rank 0 of 8, batches of 64 per rank (512 in all). Each case is a process of its own; the table has the medians of its repeats.

First batch: from the data set's length to the indices of the first batch, imports and numpy's first call excluded.
Per index: over the next 1000 batches. torch's sampler yields numbers one by one, which a DataLoader gathers into lists of 64, as is done
here; ours gives arrays of 64.
Memory: how far the process's resident set rises at most above what it was after the imports. Each rank of a node needs it. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from ddp_train.loader.order import SampleOrder, share
from ddp_train.loader.sampler import Shuffled

RANKS, PER_RANK, BATCHES = 8, 64, 1000


class Samples(Dataset[int]):
    """A data set that is nothing but its length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def main() -> None:
    """Start a process for each case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", type=int, default=[10**6, 10**7, 10**8])
    parser.add_argument("--ours-alone", nargs="*", type=int, default=[10**9, 10**12])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, length = arguments.case
        print(json.dumps(measure(SAMPLERS[name], int(length))))
        return
    print(f"torch {torch.__version__}, numpy {np.__version__}, {os.cpu_count()} cores, medians of {arguments.repeats} processes")
    print("| samples | | first batch, ms | per index, ns | memory, MiB |\n|---|---|---|---|---|")
    for length in [*arguments.lengths, *arguments.ours_alone]:
        for name in SAMPLERS if length in arguments.lengths else ["ours"]:
            runs = [run(name, length) for _ in range(arguments.repeats)]
            first, each, memory = (statistics.median(found[key] for found in runs) for key in ("first_ms", "index_ns", "memory_mib"))
            print(f"| {length:.0e} | {name} | {first:,.2f} | {each:,.0f} | {memory:,.1f} |", flush=True)


def run(name: str, length: int) -> dict[str, float]:
    """Measure one case in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmark.order_cost", "--case", name, str(length)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(batches_of: Callable[[int], Iterator[Any]], length: int) -> dict[str, float]:
    """Draw the first batch and a thousand more."""
    next(batches_of(1000))  # what is loaded at the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_mib()
    started = time.perf_counter()
    batches = batches_of(length)
    next(batches)
    first = time.perf_counter()
    drawn = sum(len(batch) for batch in itertools.islice(batches, BATCHES))
    ended = time.perf_counter()
    return {"first_ms": (first - started) * 1e3, "index_ns": (ended - first) / drawn * 1e9, "memory_mib": peak_mib() - before}


def peak_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def ours(length: int) -> Iterator[Any]:
    """Yield rank 0's batches."""
    order = SampleOrder(Shuffled(length, seed=0), global_batch_size=RANKS * PER_RANK, drop_last=False)
    samples = 0
    while True:
        batch = order.batch_at(samples)
        yield order.indices(batch.epoch, *share(batch.start, batch.stop, 0, RANKS))
        samples += batch.size


def torchs(length: int) -> Iterator[Any]:
    """Yield rank 0's batches."""
    return iter(BatchSampler(DistributedSampler(Samples(length), RANKS, 0, seed=0), PER_RANK, drop_last=False))


SAMPLERS = {"torch": torchs, "ours": ours}


if __name__ == "__main__":
    main()
