"""Ranks of torch's fake group, one process each: `python -m tests.unit.rig.ranks SIZE WAY ...` prints what each holds and calls, as JSON.

This process imports, computes nothing, and forks each rank: torch keeps what it knows of a mesh for as long as a process lives, and threads
that have computed would not be there after a fork.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_train.interfaces.objective import loss_sum
from ddp_train.interfaces.strategy import local_rows
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.zero1 import Zero1
from tests.unit.rig.cases import case

WAYS: dict[str, tuple[Callable[[], Any], int]] = {
    "fsdp": (lambda: FSDP(), 1),
    "fsdp_kept": (lambda: FSDP(reshard_after_forward=False, prefetch=1), 1),
    "fsdp_bf16": (lambda: FSDP(param_dtype="bfloat16", reduce_dtype="float32"), 1),
    "hsdp": (lambda: FSDP(replicas=4), 4),
    "hsdp_of_single_ranks": (lambda: FSDP(replicas=8), 8),
    "zero1": (lambda: Zero1(), 1),
}
"""How the weights are cut, and into how many groups of replicas."""


def be(rank: int, size: int, way: str) -> dict[str, Any]:
    """Be one rank: take a step of two micro-batches; say what it holds of each weight and its state, and what it has called."""
    calls = _noted()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    model, objective, batch = case("gpt, language_modeling")
    strategy, is_sharded = WAYS[way][0](), way != "zero1"
    module: Any = strategy.prepare(model, torch.device("cpu"), size) if is_sharded else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    strategy.setup_optimizer(optimizer)
    for is_last in (False, True):
        with torch.enable_grad() if is_last or not is_sharded else strategy.no_sync(module):
            loss_sum(objective, module, batch).total.backward()
    optimizer.step()
    kept = {}
    for name, parameter in model.named_parameters():
        state: Tensor = optimizer.state[parameter]["exp_avg"]
        kept[name] = [list(parameter.shape), list(local_rows(parameter).shape), list(local_rows(state).shape)]
    return {"rank": rank, "way": way, "kept": kept, "calls": calls}


def _noted() -> list[str]:
    """Note each collective from now on: its name, and the sizes and types of what it is given."""
    calls: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            calls.append(f"{name} {[(list(value.shape), str(value.dtype)) for value in found]}")
            return call(*args, **kwargs)

        return note

    for name in [name for name in dir(dist) if name.startswith(("all_", "reduce_", "broadcast"))]:
        setattr(dist, name, noted(name, getattr(dist, name)))
    return calls


def main(size: int, ways: list[str]) -> None:
    for way in ways:
        for rank in range(size):
            if os.fork() == 0:
                print(json.dumps(be(rank, size, way)), flush=True)
                os._exit(0)
            _, status = os.wait()
            assert status == 0, f"rank {rank} of {size}, {way}: it says why above"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
