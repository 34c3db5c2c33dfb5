"""The sizes of a batch: micro-batch x ranks x accumulation = global batch; and how rates follow the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddp_train.config.cluster import most_nodes, processes_of_nodes
from ddp_train.config.schema import ClusterConfig, LoaderConfig, TrainerConfig
from ddp_train.config.targets.target import AUTO
from ddp_train.errors import ConfigError, conflict
from ddp_train.system import process_env
from ddp_train.system.devices import resolve_device

MICRO_BATCH = "loader.micro_batch_size"
LR_SCALES: dict[Any, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
"""How rates follow the global batch (`optimizer.lr_scale`), by its ratio to the batch for which `optimizer.lr` was tuned.

Linear for SGD: one step at k times the rate goes as far as k small ones (Goyal et al. 2017, arXiv:1706.02677). Square root for Adam and
its kin, which divide by the gradient's own size: it keeps the noise of their steps (Malladi et al. 2022, arXiv:2205.10287).
"""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """global batch = micro-batch x ranks x accumulation; ranks take b or b + 1 samples where it does not divide."""

    global_batch_size: int
    micro_batch_size: int
    grad_accum_steps: int
    world_size: int
    is_derived: bool = False  # the global batch follows from the number of ranks: none was given
    is_open: bool = False  # `loader.micro_batch_size=auto`, not measured yet: the sizes are for a batch that fits as a whole

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        if self.is_open:
            return f"global batch {self.global_batch_size} on {ranks}, in micro-batches as large as fit"
        sign = "=" if self.micro_batch_size * self.world_size * self.grad_accum_steps == self.global_batch_size else "<="
        product = f"micro-batch {self.micro_batch_size} x {ranks} x accumulation {self.grad_accum_steps}"
        return f"global batch {self.global_batch_size} {sign} {product}"


def derive_batch_sizes(trainer: TrainerConfig, loader: LoaderConfig, cluster: ClusterConfig) -> BatchSizes:
    """Derive the global batch size or the accumulation, whichever is not given. ConfigError: the given values contradict each other."""
    if cluster.launcher == "local" and not process_env.is_torchrun_worker() and most_nodes(cluster) > 1:
        happened = f"is {cluster.nodes}, but cluster.launcher=local has one machine"
        raise ConfigError(key="cluster.nodes", happened=happened, fix="cluster=machines")
    world_size = sum(processes_of_nodes(cluster))
    if process_env.is_torchrun_worker():
        world_size, started = process_env.world_size(), process_env.local_world_size()
        if cluster.processes_per_node not in (None, started):
            happened = f"is {cluster.processes_per_node}, but torchrun started {started} processes on this machine"
            fix = f"--nproc-per-node={cluster.processes_per_node}, or leave the key out"
            raise ConfigError(key="cluster.processes_per_node", happened=happened, fix=fix)
    micro, total, accumulation = loader.micro_batch_size, trainer.global_batch_size, trainer.grad_accum_steps
    if micro == AUTO:
        return sizes_on(world_size, _open_batch_size(trainer, cluster), micro)
    if total is not None and accumulation is not None and micro * world_size * accumulation != total:
        product = f"micro-batch {micro} x {world_size} ranks x accumulation {accumulation} = {micro * world_size * accumulation}"
        expected = "give trainer.global_batch_size or trainer.grad_accum_steps; the other is derived"
        fix = "trainer.grad_accum_steps=null"
        raise ConfigError(key="trainer.global_batch_size", happened=f"is {total}, but {product}", expected=expected, fix=fix)
    if total is None:
        return replace(sizes_on(world_size, micro * world_size * (accumulation or 1), micro), is_derived=True)
    return sizes_on(world_size, total, micro)


def accumulation_of(size: int, loader: LoaderConfig, world_size: int) -> int:
    """Return how many micro-batches each rank has of a global batch of this size; 1 while their size is not known."""
    return 1 if loader.micro_batch_size == AUTO else -(-size // (loader.micro_batch_size * world_size))


def sizes_on(world_size: int, total: int, micro: int | Literal["auto"]) -> BatchSizes:
    """Return the sizes of a global batch on this many ranks: the accumulation follows. The micro-batch shrinks to the global batch.

    Raises ConfigError: there are more ranks than samples.
    """
    if total < world_size:
        happened = f"{total} is smaller than the world size {world_size}"
        fix = f"trainer.global_batch_size={world_size}, or fewer processes"
        raise ConfigError(key="trainer.global_batch_size", happened=happened, expected="at least one sample per rank", fix=fix)
    accumulation = 1 if micro == AUTO else -(-total // (micro * world_size))
    share = -(-total // (world_size * accumulation))
    return BatchSizes(
        global_batch_size=total,
        micro_batch_size=share if micro == AUTO else min(micro, share),
        grad_accum_steps=accumulation,
        world_size=world_size,
        is_open=micro == AUTO,
    )


def _open_batch_size(trainer: TrainerConfig, cluster: ClusterConfig) -> int:
    """Return the global batch whose micro-batch is measured. ConfigError: it is unknown, or no memory can be measured."""
    if trainer.global_batch_size is None:
        happened = f"is null, and {MICRO_BATCH} is auto: nothing says how many samples a step has"
        raise conflict("trainer.global_batch_size", happened, 256, expected="the number of samples in a step")
    if trainer.grad_accum_steps is not None:
        happened = f"is {trainer.grad_accum_steps}, and {MICRO_BATCH} is auto"
        raise conflict("trainer.grad_accum_steps", happened, "null", expected="null: it follows from the micro-batch that is found")
    if resolve_device(cluster.device) == "cpu":
        happened = "is auto, and the run is on CPU: a process that runs out of memory is killed without an error"
        raise ConfigError(key=MICRO_BATCH, happened=happened, expected="a number; auto is for GPUs", fix=f"{MICRO_BATCH}=32")
    return trainer.global_batch_size
