"""Run by each rank of a torchrun: train with strategy=local_sgd and write what tests/distributed/test_local_sgd.py compares.

    runs_apart.py FOLDER OVERRIDE...

FOLDER/RANKS.json gets, by name, the records of each run and a hash of each rank's weights in the end; of one run also the steps at which
the ranks exchanged something.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from ddp_train import CONF
from ddp_train.checkpoint.read import read_shared
from ddp_train.checkpoint.save import Saver
from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.store import join_store
from ddp_train.distributed.world import World, open_world
from ddp_train.system.process import exit_at_once
from ddp_train.training.build.build import build
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.check.memory import estimate_checkpoint
from ddp_train.training.check.rehearsal import rebuild_buckets
from ddp_train.training.parts.evaluated_weights import weights_to_evaluate
from ddp_train.training.state.saved_state import checkpoint_content, start_from
from ddp_train.training.train_state import TrainState, WindowSums
from tests.distributed.runs_of_strategies import weights
from tests.unit.parts import services

LINEAR = ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "optimizer.lr=0.05"]
EACH = ["strategy.every_steps=1", "strategy.outer_lr=1.0", "strategy.outer_momentum=0.0"]
APART = ["strategy=local_sgd", "strategy.every_steps=4", "strategy.outer_lr=0.7", "strategy.outer_momentum=0.9", "callbacks=[ema,freeze]"]
APART += ["callbacks.freeze.patterns=[blocks.0]", "callbacks.freeze.until_step=2", "callbacks.ema.decay=0.5", "trainer.clip_grad_norm=0.5"]
RUNS = {
    "ddp": ["strategy=ddp", *LINEAR],
    "every step": ["strategy=local_sgd", *EACH, *LINEAR],
    "apart": APART,
}
TEXT = [
    "data=char_text",
    "data.context_length=32",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.width=32",
    "model.dropout=0.0",
]
TEXT += [
    "objective=language_modeling",
    "trainer.global_batch_size=24",
    "trainer.max_epochs=null",
    "trainer.max_steps=100",
    "optimizer.lr=1e-2",
]
TEXT += ["scheduler.warmup_steps=10", "evaluation.batch_size=64"]
SAVED = (3, 4)  # between two synchronisations, and at one


def curve(run: RunConfig, world: World, *, to: Path | None = None, since: Path | None = None, logs_every: int = 1) -> dict[str, Any]:
    """Train to the end, from a checkpoint or from the beginning, and save on the way."""
    parts, state = build(run, world), TrainState()
    parts.strategy.start_training(parts.trained_module, {}, weights_are_equal=True)
    if since is not None:
        rebuild_buckets(parts, world)
        start_from(since, parts, state, world)
    records: list[dict[str, Any]] = []
    saver, exchanges = Saver(folder=to or Path(), world=world, config_hash="abc"), set[int]()

    def save(window: WindowSums) -> None:
        if to is None:
            return
        with weights_to_evaluate(parts) as kept:
            saver.save(checkpoint_content(parts, state, window, world, kept))
        assert saver.finish() is None
        size = sum(file.stat().st_size for file in (to / f"step_{state.step:08d}").glob("*.safetensors"))
        assert size <= estimate_checkpoint(parts, num_ranks=world.size) + (1 << 17)  # the names of a tiny model take more than its numbers

    every_steps = 1 if logs_every == 1 else 100
    config = replace(
        run,
        sanity_check=False,
        trainer=replace(run.trainer, log_every_steps=logs_every),
        evaluation=replace(run.evaluation, every_steps=2 * every_steps),
        health=replace(run.health, check_replicas_every_steps=every_steps),
    )
    around = services(
        write=lambda record: records.append(dict(record)), save=save, decide_save=lambda step: to is not None and step in SAVED
    )
    trainer = build_trainer(config, parts, state, world, around)

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            exchanges.add(state.step)
            return call(*arguments, **named)

        return noted

    before = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")}
    for name, call in before.items():
        setattr(dist, name, noting(call))
    trainer.train()
    for name, call in before.items():
        setattr(dist, name, call)
    kept = [{name: record[name] for name in ("split", "step", "loss", "grad_norm") if name in record} for record in records]
    return {"records": kept, "weights": world.gather(weights(parts)), "exchanges": sorted(exchanges)}


def mean_and_own(checkpoint: Path, world: World, run: RunConfig) -> bool:
    """Tell whether a checkpoint's weights are the mean of what the ranks have when they go on from it."""
    parts = build(run, world)
    start_from(checkpoint, parts, TrainState(), world)
    saved, alike = read_shared(checkpoint, world, only=["model"])["model"], True
    for name, value in chain(parts.model.named_parameters(), parts.model.named_buffers()):
        mean = world.sum(value.detach().clone().double()) / world.size
        alike = alike and torch.allclose(mean, saved[name].double(), rtol=1e-5, atol=1e-7)
    return alike


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        own = ["cluster=cpu", f"cluster.processes_per_node={size}", *overrides]
        runs = {name: check_config(compose("config", [*own, *each])) for name, each in RUNS.items()}
        switched = check_config(compose("config", [*own, "strategy=zero1"]))
        text = [*TEXT, f"data.path={folder}/text.txt", *own[:2]]
        learning = {name: check_config(compose("config", [*text, f"strategy={name}"])) for name in ("ddp", "local_sgd")}  # every 20 steps
    world = open_world(join_store(), rank, size, device="cpu")
    found: dict[str, Any] = {name: curve(run, world, to=folder / f"{name}_{size}") for name, run in runs.items()}
    found["rarely logged"] = curve(runs["apart"], world, logs_every=100)
    for checkpoint in sorted(folder.glob("apart_*/step_*")):
        found[f"from {checkpoint.parent.name} {int(checkpoint.name[5:])}"] = curve(runs["apart"], world, since=checkpoint)
    found["is mean"] = [mean_and_own(folder / f"apart_{size}" / f"step_{step:08d}", world, runs["apart"]) for step in SAVED]
    found["zero1"] = curve(switched, world, since=folder / f"apart_{size}" / "step_00000003")
    found["learning"] = {name: curve(run, world, logs_every=100)["records"][-1]["loss"] for name, run in learning.items()}
    if world.is_main:
        (folder / f"{size}.json").write_text(json.dumps(found))
    world.barrier()
    exit_at_once(0)


if __name__ == "__main__":
    main()
