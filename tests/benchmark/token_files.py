"""What a batch from token files costs, beside indexing one mapped array directly: the same windows, in the same random order.

    python tests/benchmark/token_files.py [--samples 64] [--context-length 1024] [--tokens 100000000] [--shards 1 10]

Writes the tokens into a temporary folder first. The two are measured in turns, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ddp_train.data.token_files import TokenFiles
from ddp_train.hashing import Permutation
from ddp_train.interfaces import Batch, Indices

_BATCHES, _ROUNDS = 10, 1000  # a round is shorter than a time slice: on a busy machine some are left alone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 10])
    asked = parser.parse_args()
    length = asked.context_length
    for num_shards in asked.shards:
        with tempfile.TemporaryDirectory() as folder:
            tokens = write(Path(folder), asked.tokens, num_shards)
            data = TokenFiles(folder, context_length=length)
            order = Permutation(len(data), 1)(np.arange(len(data)))
            batches = [np.resize(np.roll(order, -number * asked.samples), asked.samples) for number in range(_BATCHES)]
            windows = sliding_window_view(tokens, length + 1)

            def direct(indices: Indices, windows: Any = windows) -> Batch:
                found = windows[indices * length]
                return torch.from_numpy(found[:, :-1].astype(np.int64)), torch.from_numpy(found[:, 1:].astype(np.int64))

            assert all(torch.equal(one, other) for one, other in zip(direct(batches[0]), data.batch(batches[0]), strict=True))
            rounds = [(microseconds(direct, batches), microseconds(data.batch, batches)) for _ in range(_ROUNDS)]
            theirs, ours = np.min(rounds, axis=0)
            print(
                f"{asked.samples} x {length} tokens, {num_shards} files: array {theirs:.1f} us, token files {ours:.1f} us a batch"
                f" ({100 * (ours / theirs - 1):+.1f}%)"
            )


def write(folder: Path, num_tokens: int, num_shards: int) -> Any:
    """Write random tokens as shards, and return all of them as one mapped array."""
    tokens = np.random.default_rng(0).integers(0, 256, num_tokens, np.uint16)
    shards = []
    for number, part in enumerate(np.array_split(tokens, num_shards)):
        part[-1] = 256
        name = f"train_{number:05d}"
        part.tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.starts.npy", np.zeros(1, np.int64))
        shards.append({"file": f"{name}.bin", "tokens": len(part), "documents": 1})
    index = {"format": "ddp_train tokens 1", "dtype": "uint16", "vocab_size": 257, "tokenizer": "byte", "end_of_text": 256}
    (folder / "index.json").write_text(json.dumps({**index, "splits": {"train": shards}}))
    tokens.tofile(folder / "all.bin")
    return np.asarray(np.memmap(folder / "all.bin", "<u2", mode="r"))


def microseconds(read: Callable[[Indices], Batch], batches: list[Indices]) -> float:
    """Return what one batch costs."""
    began = time.perf_counter()
    for indices in batches:
        read(indices)
    return (time.perf_counter() - began) / len(batches) * 1e6


if __name__ == "__main__":
    main()
