"""What each rank keeps of weights, gradients and optimizer state under each strategy, by part, after a step of a GPT of 95 M parameters.

    torchrun --standalone --nproc-per-node=4 -m tests.benchmark.strategy_memory ddp zero1 fsdp

Counts the bytes of the rows that a rank has when the optimizer has stepped, the most of any rank. What a block's weights take while it
computes comes on top: those of one block, or of the embeddings.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, open_world
from ddp_train.interfaces import Strategy, own_rows
from ddp_train.model.gpt import GPT
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.zero1 import Zero1
from ddp_train.system.process import exit_at_once

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "zero1": Zero1, "fsdp": FSDP}


def parts(strategy: Strategy, world: World) -> dict[str, int]:
    """Take a step, and return the bytes of each part on this rank."""
    torch.manual_seed(0)
    model = GPT(vocab_size=50257, context_length=16, num_layers=8, num_heads=12, width=768)
    module = strategy.prepare(model, world.device, world.size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    strategy.share(optimizer)
    tokens = torch.randint(0, 50257, (1, 16))
    nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    parameters = list(model.parameters())
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(value for state in optimizer.state.values() for value in state.values()),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(own_rows(tensor).nbytes for tensor in tensors)


def main() -> None:
    """Print a line for each strategy, and what it comes to beside the first one."""
    world = open_world(join_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device="cpu")
    first = 0
    for name in sys.argv[1:]:
        every = world.gather(parts(STRATEGIES[name](), world))
        gc.collect()
        most = max(every, key=lambda each: sum(each.values()))
        first = first or sum(most.values())
        if world.is_main:
            shown = "  ".join(f"{part} {size / 1e6:,.0f} MB" for part, size in most.items())
            print(f"{name:6} {shown}  together {sum(most.values()) / first:.3f} of the first", flush=True)
    world.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main()
