"""Print what thousands of ranks cost: `python -m tests.benchmark.scale --ranks 4096 16384`.

Our code runs, and not a model of it: the node programs of all machines over real sockets, all ranks at once as threads where they talk
through the store, single ranks in a group of torch's fake backend where each works for itself. The collectives of a step alone are
reckoned. docs/scale.md has the results.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import torch

from tests.benchmark.scale import machine_parts, network, rank_parts, store_parts

_PARTS = ("machines", "store", "ranks", "network")
_MOST_FAILING = 256  # all ask all where one does not ask for all
_TOKENS = 8192  # of a GPU in a step


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    if "machines" in arguments.parts:
        machines(arguments.ranks)
    if "store" in arguments.parts:
        store(arguments.ranks)
    if "ranks" in arguments.parts:
        ranks(arguments.ranks)
    if "network" in arguments.parts:
        networks(arguments.ranks)


def machines(sizes: Sequence[int]) -> None:
    """What the first machine does for all."""
    _head("ranks", "machines", "start, s", "restart, s", "end, s", "MB told", "MB said", "tries")
    for size in sizes:
        found = machine_parts.attempts_of(size)
        assert found.code == 0, found
        seconds = (f"{each:.2f}" for each in (found.start_s, found.restart_s, found.end_s))
        _row(size, found.machines, *seconds, f"{found.told_bytes / 1e6:.1f}", f"{found.said_bytes / 1e6:.1f}", found.tries)


def store(sizes: Sequence[int]) -> None:
    """What goes through the store."""
    _head("part", "ranks", "requests", "of rank 0", "of another", "MB", "seconds here")
    for size in sizes:
        for act in (store_parts.meeting, store_parts.saving, store_parts.leaving):
            _traffic(act(size))
    for size in sorted({min(size, _MOST_FAILING) for size in (64, *sizes)}):
        _traffic(store_parts.failing(size))


def ranks(sizes: Sequence[int]) -> None:
    """What one rank pays by itself."""
    _head("part", "ranks", "rank", "ms", "MiB more")
    for size in sizes:
        manifest, restored = rank_parts.restoring(size)
        plans = [rank_parts.dividing(size, name) for name in rank_parts.SHAPES]
        gathered = [*rank_parts.starting(size), *rank_parts.gathering(size)]
        for each in (*gathered, *rank_parts.comparing(size), *plans, *restored, *rank_parts.seeking(size)):
            _row(each.part, each.ranks, each.rank, f"{each.ms:.1f}", f"{each.peak_mib:.1f}")
        print(f"\nThe manifest of {size} files has {manifest / 1e6:.2f} MB. Each rank is told {rank_parts.job_bytes(size) / 1e3:.1f} kB.\n")


def networks(sizes: Sequence[int]) -> None:
    """What the collectives of a step take, reckoned."""
    _head(
        "network",
        "model",
        "GPUs",
        "compute",
        "all-reduce, ring",
        "tree",
        "reduce-scatter or all-gather, ring",
        "exposed of a DDP step, at least",
    )
    for each in network.NETWORKS:
        for name, parameters in network.MODELS.items():
            for size in (8, 512, *sizes):
                compute = network.compute_s(each, parameters, _TOKENS)
                ring, tree = (network.all_reduce_s(each, 4 * parameters, size, by=by) for by in ("ring", "tree"))
                half = network.scatter_or_gather_s(each, 2 * parameters, size)
                exposed = max(0.0, min(ring, tree) - 2 / 3 * compute)  # all of backward hides it at best
                shares = (f"{1e3 * seconds:.1f} ms" for seconds in (compute, ring, tree, half))
                _row(each.name, name, size, *shares, f"{100 * exposed / (compute + exposed):.0f} %")


def _traffic(found: store_parts.Traffic) -> None:
    numbers = (found.requests, found.requests_of_main, found.most_of_others)
    _row(found.part, found.ranks, *(f"{number:,}" for number in numbers), f"{found.bytes / 1e6:.2f}", f"{found.seconds:.1f}")


def _head(*names: str) -> None:
    print()
    _row(*names)
    _row(*("---" for _ in names))


def _row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
