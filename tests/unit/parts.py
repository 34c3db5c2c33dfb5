"""Build components in this process, as a run of one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from ddp_train.checkpoint.manifest import FileEntry, Manifest, Ranking
from ddp_train.checkpoint.save import Saver
from ddp_train.config.check import CONF, check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.world import World, alone
from ddp_train.training.build.build import build
from ddp_train.training.build.features import Features, add_features, make_train_step
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.conftest import TINY

LOSS = Ranking(metric="eval/loss", goal="min")


def checked(*overrides: str, base: list[str] = TINY) -> RunConfig:
    """Compose and check a small run on one CPU process."""
    own = ["cluster=cpu", "cluster.processes_per_node=1", *base, *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return check_config(compose("config", own))


def components(*overrides: str, base: list[str] = TINY) -> Components:
    """Build a small run's components."""
    run = checked(*overrides, base=base)
    return build(run, alone())


def trainer(parts: Components, state: TrainState | None = None, world: World | None = None, **changes: Any) -> Trainer:
    """Return what trains the components, with what their features add; it writes nothing and saves nothing."""
    features = Features(**{name: changes.pop(name) for name in [each.name for each in fields(Features)] if name in changes})
    state, world = state or TrainState(), world or alone()
    of_step = {name: changes.pop(name) for name in ("clip_grad_norm", "guard") if name in changes}
    settings: dict[str, Any] = {"log_every_steps": 1, "evaluate_every_steps": None}
    settings |= {"write": lambda record: None, "save": lambda window: None} | changes
    step = make_train_step(parts, state, world, **of_step)
    return add_features(Trainer(components=parts, state=state, world=world, train_step=step, **settings), features)


def manifest(step: int, **changes: Any) -> Manifest:
    """Return the manifest of a checkpoint of one rank."""
    files = {"rank_00000.safetensors": FileEntry(bytes=8, xxh3_128="ab")}
    facts = {"world_size": 1, "config_sha256": "abc", "torch": "2.10", "metrics": {}, "ranked_by": None, "files": files}
    return Manifest(step=step, **facts | changes)


def saved(folder: Path, step: int, parts: Components, metrics: Mapping[str, Any] | None = None) -> Path:
    """Save a checkpoint as a run does, and return it."""
    saver = Saver(folder, alone(), config_hash="abc")
    saver.save(content(parts, TrainState(step=step, samples=step * 32), WindowSums(), alone()), metrics=metrics, ranked_by=LOSS)
    assert saver.finish() == ""
    return folder / f"step_{step:08d}"
