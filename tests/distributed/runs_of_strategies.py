"""Run by each rank of a torchrun: train the same few steps with each strategy, and go on from every checkpoint in FOLDER with each.

    runs_of_strategies.py FOLDER OVERRIDE...

Of each strategy a checkpoint after SAVED steps stays in FOLDER/STRATEGY_RANKS, where torchruns of other sizes find it. FOLDER/RANKS.json
gets, for "STRATEGY" and "STRATEGY from CHECKPOINT", the records of training and evaluation, and a hash of the weights in the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from ddp_train import CONF
from ddp_train.checkpoint.save import Saver
from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, open_world
from ddp_train.interfaces.strategy import is_sharded, local_rows
from ddp_train.system.process import exit_at_once
from ddp_train.training.build.build import build
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.check.memory import estimate_checkpoint, memory_by_part
from ddp_train.training.check.rehearsal import rebuild_buckets
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluated_weights import weights_to_evaluate
from ddp_train.training.state.saved_state import checkpoint_content, start_from
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.parts import services

SAVED = 3
SETTINGS = ["cluster=cpu", "trainer.clip_grad_norm=0.5", "callbacks=[ema,freeze]", "callbacks.freeze.patterns=[blocks.0]"]
SETTINGS += ["callbacks.freeze.until_step=2", "callbacks.ema.decay=0.5", "evaluation.batch_size=5"]
SETTINGS += ["evaluation.every_steps=2", "trainer.log_every_steps=1"]


def strategies(world_size: int) -> dict[str, list[str]]:
    found = {name: [f"strategy={name}"] for name in ("ddp", "zero1", "fsdp")}
    if world_size == 4:
        found |= {"hsdp": ["strategy=fsdp", "strategy.replicas=2", "strategy.reshard_after_forward=false"]}
    return found if world_size > 1 else {"ddp": found["ddp"]}


def curve(run: RunConfig, world: World, *, to: Path | None = None, since: Path | None = None) -> dict[str, Any]:
    """Train to the end, from a checkpoint or from the beginning, and save one on the way."""
    parts, state = build(run, world), TrainState()
    if since is not None:
        rebuild_buckets(parts, world)
        start_from(since, parts, state, world)
    records: list[dict[str, Any]] = []
    saver = Saver(folder=to or Path(), world=world, config_hash="abc")

    def save(window: WindowSums) -> None:
        assert estimate_checkpoint(parts, num_ranks=world.size) > 0
        if to is not None:
            with weights_to_evaluate(parts) as kept:
                saver.save(checkpoint_content(parts, state, window, world, kept))

    around = services(
        write=lambda record: records.append(dict(record)), save=save, decide_save=lambda step: to is not None and step == SAVED
    )
    build_trainer(replace(run, sanity_check=since is None), parts, state, world, around).train()
    assert saver.finish() is None
    if world.is_main and since is None:  # it has the most of all that is cut
        foreseen = memory_by_part(parts, num_ranks=world.size)
        assert {name: foreseen[name] for name in ("parameters", "gradients", "optimizer")} == measured(parts)
    kept = [{name: record[name] for name in ("split", "step", "loss", "grad_norm") if name in record} for record in records]
    return {"records": kept, "weights": weights(parts)}


def measured(parts: Components) -> dict[str, int]:
    """Return the bytes that this rank has from step to step, tensor by tensor."""
    trained = list(parts.trained_module.parameters())
    state = [value for values in parts.optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": sum(local_rows(each).nbytes for each in [*trained, *parts.trained_module.buffers()]),
        "gradients": sum(local_rows(each).nbytes for each in trained if each.requires_grad),
        "optimizer": sum(local_rows(each).nbytes for each in state),
    }


def weights(parts: Components) -> str:
    """Return a hash of all weights, put together."""
    digest = hashlib.sha256()
    for value in parts.model.state_dict().values():
        digest.update((value.full_tensor() if is_sharded(value) else value).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        runs = {
            name: check_config(compose("config", [*SETTINGS, *overrides, *own, f"cluster.processes_per_node={size}"]))
            for name, own in strategies(size).items()
        }
    world = open_world(join_store(), rank, size, device="cpu")
    found = {name: curve(run, world, to=folder / f"{name}_{size}") for name, run in runs.items()}
    world.barrier()
    checkpoints = sorted(folder.glob(f"*/step_{SAVED:08d}"))
    for checkpoint in checkpoints:
        for name, run in runs.items():
            found[f"{name} from {checkpoint.parent.name}"] = curve(run, world, since=checkpoint)
    if world.is_main:
        (folder / f"{size}.json").write_text(json.dumps(found))
    world.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main()
