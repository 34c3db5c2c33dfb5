"""What one rank of thousands pays by itself: our own code, in a group of torch's fake backend, which answers at once.

Ranks 0, the middle one and the last are measured where they differ; all others do what the middle one does.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_train.checkpoint import codec, tensor_file
from ddp_train.checkpoint.layout import divide_shared
from ddp_train.checkpoint.manifest import FileEntry, rank_file
from ddp_train.checkpoint.read import damage_of
from ddp_train.checkpoint.save import publish
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.world import World
from ddp_train.launch.job import Job
from ddp_train.loader.order import SampleOrder, share
from ddp_train.loader.sampler import Shuffled
from ddp_train.run_folder.paths import RunFolder, step_folder
from ddp_train.strategy.ddp import DDP
from ddp_train.training.build.build import build
from ddp_train.training.loop.replica_check import ReplicaCheck
from tests.unit.parts import checked, manifest

SHAPES = {"GPT-2 124M": (12, 768), "GPT-2 1.3B": (24, 2048), "GPT 7B": (32, 4096)}  # layers, width
_FACTS = {"host": "node-0123", "sees_run_folder": True, "device": "cuda:0 (NVIDIA H100 80GB HBM3)", "threads": 12}
_FACTS |= {"config_sha256": "0" * 64, "ddp_train": "0.1.0", "torch": "2.13.0"}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a part costs one rank."""

    part: str
    ranks: int
    rank: int
    ms: float
    peak_mib: float  # of the resident set, above what it was before


def starting(size: int) -> list[Cost]:
    """Build a small run as a rank does, wrapped in DDP, as one of so many and as one of eight."""
    found = []
    for ranks, rank in ((8, 0), (size, 0), (size, size // 2), (size, size - 1)):
        config = _config(ranks)
        with fake_world(rank, ranks) as world:
            found.append(cost("build, with DDP", world, lambda: build(config, world)))  # noqa: B023
    return found[1:] if size == 8 else found


def job_bytes(size: int) -> int:
    """Return how many bytes a job has, of which each rank gets a copy."""
    job = Job(config=_config(size), run_folder=RunFolder(Path("/runs/name/2026-11-22_20-00-00")), command=["ddp-train"], overrides=[])
    return len(job.to_json())


def gathering(size: int) -> list[Cost]:
    """Let each rank tell all others its facts, and let all tell rank 0 alone."""
    found = []
    with fake_world(0, size) as world:
        found.append(cost("facts, each hears all", world, lambda: world.gather(_FACTS)))
        found.append(cost("facts, rank 0 hears all", world, lambda: world.gather_to_main(_FACTS)))
    with fake_world(size // 2, size) as world:
        found.append(cost("facts, rank 0 hears all", world, lambda: world.gather_to_main(_FACTS)))
    return found


def comparing(size: int) -> list[Cost]:
    """Compare the weights of the ranks, of a model with as many tensors as GPT-2 124M."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(74)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with fake_world(0, size) as world:
        others = lambda: {"scheduler": "0" * 64}  # noqa: E731
        check = ReplicaCheck(model=model, world=world, every_steps=1, optimizer=optimizer, others=others, strategy=DDP())
        return [cost("weights compared", world, lambda: check.before_save(1))]


def dividing(size: int, name: str) -> Cost:
    """Plan who writes what of a checkpoint with Adam's state."""
    with fake_world(0, size) as world:
        return cost(
            f"plan of a checkpoint, {name}", world, lambda: divide_shared(leaves(name), size, written_in_shares=["model", "optimizer"])
        )


def seeking(size: int) -> list[Cost]:
    """Find the indices of a step in the middle of 10 billion samples."""

    def seek(rank: int) -> Any:
        order = SampleOrder(Shuffled(10**10, seed=0), global_batch_size=size * 8, drop_last=False)
        batch = order.batch_at(10**9 // (size * 8) * (size * 8))
        return order.indices(batch.epoch, *share(batch.start, batch.stop, rank, size))

    seek(0)  # what is loaded at the first call
    return [cost("seek in 10^10 samples", _bare(rank, size), lambda: seek(rank)) for rank in (0, size // 2, size - 1)]  # noqa: B023


def restoring(size: int) -> tuple[int, list[Cost]]:
    """Write a checkpoint of so many files in memory, and verify it as a rank does; return the bytes of its manifest too."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        checkpoint = folder / step_folder(1)
        (folder / ".partial").mkdir()
        values = torch.ones(64, dtype=torch.uint8)
        header = tensor_file.make_header([("rank", torch.uint8, (64,))])
        files = {}
        for rank in range(size):
            digest = tensor_file.write(folder / ".partial" / rank_file(rank), (memoryview(header), values.numpy().data))
            files[rank_file(rank)] = FileEntry(bytes=len(header) + 64, xxh3_128=digest)
        of_all = manifest(1, world_size=size, config_sha256="0" * 64, files=files)
        found = []
        with fake_world(0, size) as world:
            found.append(cost("checkpoint published", world, lambda: publish(folder / ".partial", checkpoint, of_all)))
            found.append(cost("checkpoint verified", world, lambda: damage_of(checkpoint, world)))
        own = {rank_file(size // 2): files[rank_file(size // 2)]}
        with fake_world(size // 2, size) as world:
            object.__setattr__(world, "each_from_main", lambda make: ("", own))  # the fake backend brings nothing from rank 0
            found.append(cost("checkpoint verified", world, lambda: damage_of(checkpoint, world)))
        return (checkpoint / "manifest.json").stat().st_size, found
    finally:
        shutil.rmtree(folder)


def leaves(name: str) -> list[codec.Leaf]:
    """Return the tensors of a model with Adam's state: names, types and shapes."""
    layers, width = SHAPES[name]
    block = {"ln": (width,), "qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    shapes = {"embedding": (50304, width), "positions": (1024, width)}
    shapes |= {f"blocks.{number}.{part}": shape for number in range(layers) for part, shape in block.items()}
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return [codec.Leaf(f"shared.{kind}.{part}", torch.float32, shape, None) for kind in kinds for part, shape in shapes.items()]


def _config(size: int) -> RunConfig:
    where = ["cluster=machines", f"cluster.nodes={size // 8}", "cluster.processes_per_node=8", "cluster.rendezvous_endpoint=node0"]
    return checked(
        *where, "trainer.global_batch_size=null", "trainer.grad_accum_steps=1", "loader.micro_batch_size=1", "data.num_samples=65536"
    )


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """Open a group of so many ranks of which this process is one."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield _bare(rank, size)
    finally:
        dist.destroy_process_group()


def cost(part: str, world: World, act: Callable[[], Any]) -> Cost:
    """Measure it once."""
    _forget_peak()
    before, started = _peak_mib(), time.perf_counter()
    act()
    ms = (time.perf_counter() - started) * 1e3
    return Cost(part=part, ranks=world.size, rank=world.rank, ms=ms, peak_mib=_peak_mib() - before)


def _bare(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank % 8, local_size=8, device=torch.device("cpu"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
