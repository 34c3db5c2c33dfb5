"""Run by each rank of a torchrun: write the gradient of one step, as our own loop takes it. Used by test_token_exactness.py.

    gradient_of_a_step.py FILE OVERRIDE...

FILE gets, from rank 0, an array of all parameters' gradients for each of DATA and DTYPES, and for each of DATA the gradient of torch's own
mean over the whole global batch in one forward.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor

from ddp_train import CONF
from ddp_train.amp import Amp
from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.data.packed_tokens import PackedTokens
from ddp_train.data.padded_tokens import PaddedTokens
from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, open_world
from ddp_train.system.process import exit_at_once
from ddp_train.training.build.build import build
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.train_state import TrainState
from tests.unit.parts import services

DATA = {"packed_tokens": PackedTokens, "padded_tokens": PaddedTokens}
DTYPES = (
    "float32",
    "float32_scaled",
    "float16",
)  # the last two with a loss scaler; the config check refuses float16 on CPU, the loop does not


def flat_gradient(parts: Components) -> Tensor:
    return torch.cat([parameter.grad.flatten().clone() for parameter in parts.model.parameters() if parameter.grad is not None])


def gradient_of_a_step(run: RunConfig, world: World, dtype: str) -> Tensor:
    parts = build(run, world)
    if dtype == "float16":
        parts = replace(parts, amp=Amp("float16"))
    if dtype != "float32":
        parts = replace(parts, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    loader, noted = parts.train_loader, list[Tensor]()
    parts.optimizer.step = lambda: noted.append(flat_gradient(parts))  # type: ignore[method-assign]
    parts.trained_module.train()
    micro_batches = list(islice(loader.micro_batches(0), loader.grad_accum_steps))
    size = loader.order.batch_at(0).size
    trainer = build_trainer(run, parts, TrainState(), world, services())
    trainer.train_step(micro_batches, global_batch_size=size, measures_norm=True)
    return noted[0]


def plain_gradient(data: str, run: RunConfig, world: World) -> Tensor:
    parts = build(run, world)
    source, order = DATA[data](run.data["root"], context_length=run.data["context_length"]), parts.train_loader.order
    tokens, targets = source.batch(order.indices(0, 0, order.batch_at(0).size))
    F.cross_entropy(parts.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    return flat_gradient(parts)


def main() -> None:
    file, *overrides = sys.argv[1:]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        runs = {data: check_config(compose("config", ["cluster=cpu", f"data={data}", *overrides])) for data in DATA}
    world = open_world(join_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device="cpu")
    found = {}
    for data, run in runs.items():
        found |= {f"{data}.{dtype}": gradient_of_a_step(run, world, dtype) for dtype in DTYPES}
        found[f"{data}.plain"] = plain_gradient(data, run, world)
    if world.is_main:
        np.savez(file, **{name: gradient.numpy() for name, gradient in found.items()})
    world.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main()
