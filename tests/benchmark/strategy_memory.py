"""What each rank keeps of weights, gradients and optimizer state under each strategy, by part, and the most that a step takes.

    MALLOC_MMAP_THRESHOLD_=65536 torchrun --standalone --nproc-per-node=4 -m tests.benchmark.strategy_memory ddp zero1 fsdp
    ... -m tests.benchmark.strategy_memory --layers=32 --width=512 --vocab=256 ddp fsdp

Counts the bytes of the rows that a rank has when the optimizer has stepped, the most of any rank. The peak is the most that the process had
in its second step, as the kernel counts it, less what it had before the model was made: with what travels, and activations of 16 tokens.
Small pieces of memory are given back at once, by the variable, so that the peak is no memory of before.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, open_world
from ddp_train.interfaces.strategy import Strategy, local_rows
from ddp_train.model.gpt import GPT
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.zero1 import Zero1
from ddp_train.system.process import exit_at_once

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "zero1": Zero1, "fsdp": FSDP}


def parts(strategy: Strategy, world: World, shape: argparse.Namespace) -> dict[str, int]:
    """Take two steps, and return the bytes of each part on this rank, and the peak of the second one."""
    torch.manual_seed(0)
    before = in_memory("VmRSS")
    model = GPT(vocab_size=shape.vocab, context_length=16, num_layers=shape.layers, num_heads=8, width=shape.width)
    module = strategy.prepare(model, world.device, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    strategy.setup_optimizer(optimizer)
    tokens = torch.randint(0, shape.vocab, (1, 16))
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    parameters = list(model.parameters())
    return {
        "peak": in_memory("VmHWM") - before,
        "weights": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(value for state in optimizer.state.values() for value in state.values()),
    }


def in_memory(name: str) -> int:
    """Return one of the sizes that the kernel tells of this process, in bytes: VmRSS now, VmHWM at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_rows(tensor).nbytes for tensor in tensors)


def main() -> None:
    """Print a line for each strategy, and what it comes to beside the first one."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 8), ("width", 768), ("vocab", 50257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("strategies", nargs="+", choices=STRATEGIES)
    shape = parser.parse_args()
    world = open_world(join_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device="cpu")
    first: dict[str, int] = {}
    for name in shape.strategies:
        every = world.gather(parts(STRATEGIES[name](), world, shape))
        gc.collect()
        most = {part: max(each[part] for each in every) for part in every[0]}
        most = {"together": sum(size for part, size in most.items() if part != "peak"), **most}
        first = first or most
        if world.is_main:
            shown = "  ".join(f"{part} {size / 1e6:,.0f} MB" for part, size in most.items())
            beside = ", ".join(f"{part} {most[part] / first[part]:.3f}" for part in ("together", "peak"))
            print(f"{name:6} {shown}  of the first: {beside}", flush=True)
    world.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main()
