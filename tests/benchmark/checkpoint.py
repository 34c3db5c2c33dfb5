"""What a checkpoint costs: ours beside a plain write, torch.save, safetensors and torch.distributed.checkpoint.

    python tests/benchmark/checkpoint.py [--rounds 7] [--millions 100] [--adam] [--folder FOLDER]

Two processes hold the same float32 parameters (and Adam's state with --adam), as under DDP. The ways take turns; each round gives one
ratio to `raw` (one process writes the same bytes from memory and calls fsync). Stall: what the training thread waits, the slower of both
ranks. Total: until all is on disk. The first round is not counted: it is when buffers are made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xxhash
from torch import nn

from ddp_train.checkpoint.save import Saver
from ddp_train.distributed.world import World
from ddp_train.scheduler import constant
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums

SIDE = 2_000  # of a weight matrix: 4 million parameters
Way = Callable[[Path], Callable[[], None]]
"""Begins to save into a new folder, and returns what waits until all is on disk."""


def done() -> None:
    """Nothing is left to wait for."""


class Rank:
    """One process with its copy of the state."""

    def __init__(self, world: World, *, millions: int, adam: bool) -> None:
        self.world = world
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(SIDE, SIDE, bias=False) for _ in range(millions * 1_000_000 // SIDE**2)])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters()) if adam else torch.optim.SGD(model.parameters())
        if adam:
            for parameter in model.parameters():
                zeros = [torch.rand_like(parameter) for _ in range(2)]
                optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        self.components: Any = SimpleNamespace(
            model=model,
            trained_module=model,
            optimizer=optimizer,
            scheduler=constant(optimizer),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            train_loader=SimpleNamespace(state_dict=lambda samples: {}),
        )
        self.state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.flat = {f"model.{name}": value for name, value in model.state_dict().items()}
        for number, values in self.state["optimizer"]["state"].items():
            self.flat |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
        self.num_bytes = sum(value.numel() * value.itemsize for value in self.flat.values())
        self.raw_bytes = torch.cat([value.reshape(-1).view(torch.uint8) for value in self.flat.values()]).numpy()
        self.saver: Saver | None = None
        self.async_group = dist.new_group(backend="gloo")

    def ways(self) -> dict[str, Way]:
        return {
            "raw": self.raw,
            "raw, half by each rank": self.raw_halves,
            "torch.save + fsync": self.torch_save,
            "safetensors + fsync": self.safetensors_save,
            "DCP": self.dcp_save,
            "DCP async": self.dcp_async,
            "ours": self.ours,
        }

    def raw(self, folder: Path) -> Callable[[], None]:
        if self.world.is_main:
            write(folder / "raw", self.raw_bytes.data)
        return done

    def raw_halves(self, folder: Path) -> Callable[[], None]:
        middle = len(self.raw_bytes) // 2
        half = self.raw_bytes[:middle] if self.world.is_main else self.raw_bytes[middle:]
        write(folder / f"raw_{self.world.rank}", half.data)
        return done

    def torch_save(self, folder: Path) -> Callable[[], None]:
        if self.world.is_main:
            with (folder / "state.pt").open("wb") as file:
                torch.save(self.state, file)
                file.flush()
                os.fsync(file.fileno())
        return done

    def safetensors_save(self, folder: Path) -> Callable[[], None]:
        if self.world.is_main:
            safetensors.torch.save_file(self.flat, folder / "state.safetensors")
            descriptor = os.open(folder / "state.safetensors", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return done

    def dcp_save(self, folder: Path) -> Callable[[], None]:
        dcp.save(dict(self.flat), checkpoint_id=folder)
        return done

    def dcp_async(self, folder: Path) -> Callable[[], None]:
        future: Any = dcp.async_save(dict(self.flat), checkpoint_id=folder, process_group=self.async_group)
        return lambda: future.result() and None

    def ours(self, folder: Path) -> Callable[[], None]:
        if self.saver is None:
            self.saver = Saver(folder=folder.parent / "ours", world=self.world, config_hash="", remove_old=lambda path: None)
            self.step = 0
        self.step += 1
        self.saver.save(checkpoint_content(self.components, TrainState(step=self.step), WindowSums(), self.world))

        def wait() -> None:
            assert self.saver is not None
            problem = self.saver.finish()
            assert not problem, problem

        return wait


def write(path: Path, content: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    while content:
        content = content[os.write(descriptor, content[: 8 << 20]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def measure(rank: int, port: int, arguments: argparse.Namespace, root: str) -> None:
    """Take turns, and let rank 0 print the table."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    torch.set_num_threads(1)
    world = World(rank=rank, size=2, local_rank=rank, local_size=2, device=torch.device("cpu"), store=store)
    mine = Rank(world, millions=arguments.millions, adam=arguments.adam)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in mine.ways()}
    hashing = []
    for number in range(arguments.rounds + 1):
        for name, way in mine.ways().items():
            folder = Path(root) / f"{number}_{name.replace(' ', '_').replace(',', '')}"
            if world.is_main:
                folder.mkdir()
            world.barrier()
            started = time.perf_counter()
            wait = way(folder)
            stall = time.perf_counter() - started
            wait()
            world.barrier()
            total = time.perf_counter() - started
            stall = max(world.gather(stall))
            if number == 0 and name == "ours" and world.is_main:
                print(f"first save, with its buffer: stall {stall:.3f} s, total {total:.3f} s")
            if number:
                times[name].append((stall, total))
            if world.is_main:
                shutil.rmtree(folder)
                shutil.rmtree(Path(root) / "ours", ignore_errors=True)
            world.barrier()
        started = time.perf_counter()
        xxhash.xxh3_128(mine.raw_bytes[: len(mine.raw_bytes) // 2].data)
        hashing.append(time.perf_counter() - started)
    if world.is_main:
        print(f"{mine.num_bytes / 1e6:,.0f} MB, {arguments.rounds} rounds; ratios are medians over rounds\n")
        print("| way | stall s, median (min) | total s, median (min) | stall / raw | total / raw |\n|---|---|---|---|---|")
        raw = [total for _, total in times["raw"]]
        for name, found in times.items():
            if name.startswith("raw") or name in ("torch.save + fsync", "safetensors + fsync", "DCP"):
                found = [(total, total) for _, total in found]  # rank 1 waits for rank 0 in the next collective
            cells = [f"{statistics.median(column):.3f} ({min(column):.3f})" for column in zip(*found, strict=True)]
            ratios = [
                f"{statistics.median(value / base for value, base in zip(column, raw, strict=True)):.2f}"
                for column in zip(*found, strict=True)
            ]
            print(f"| {name} | {' | '.join(cells + ratios)} |")
        ours = [total for _, total in times["ours"]]
        print(
            f"\nchecksum: {100 * statistics.median(hashing[1:]) / statistics.median(ours):.1f} % of a save of ours (minima: "
            f"{100 * min(hashing) / min(ours):.1f} %)"
        )
    world.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary directory")
    arguments = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        mp.spawn(measure, args=(store.port, arguments, root), nprocs=2)


if __name__ == "__main__":
    main()
