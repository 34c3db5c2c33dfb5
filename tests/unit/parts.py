"""Build components in this process, as a run of one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_train import CONF
from ddp_train.checkpoint.manifest import FileEntry, Manifest, Ranking
from ddp_train.checkpoint.save import Saver
from ddp_train.config.check import check_config
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import ProfileConfig
from ddp_train.distributed.world import World, alone
from ddp_train.training.build.build import build
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.loop.trainer import RunServices, Trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.state.saved_state import checkpoint_content
from ddp_train.training.train_state import TrainState, WindowSums
from tests.conftest import TINY

LOSS = Ranking(metric="eval/loss", goal="min")


def checked(*overrides: str, base: list[str] = TINY) -> RunConfig:
    """Compose and check a small run on one CPU process."""
    return check_config(deepcopy(_composed("cluster=cpu", "cluster.processes_per_node=1", *base, *overrides)))


@cache
def _composed(*overrides: str) -> DictConfig:
    """Compose what many tests ask for once in a process: it takes five times as long as the check and the building."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def components(*overrides: str, base: list[str] = TINY) -> Components:
    """Build a small run's components."""
    run = checked(*overrides, base=base)
    return build(run, alone())


def trainer(
    parts: Components,
    state: TrainState | None = None,
    world: World | None = None,
    *,
    log_every_steps: int = 1,
    evaluate_every_steps: int | None = None,
    clip_grad_norm: float | None = None,
    on_nonfinite: str = "stop",
    check_replicas_every_steps: int | None = None,
    sanity_check: bool = False,
    settings: dict[str, Any] | None = None,
    profile: ProfileConfig | None = None,
    **services: Any,
) -> Trainer:
    """Return what trains the components, with what their features add; by default it writes nothing and saves nothing."""
    plain = _plain()
    config = replace(
        plain,
        sanity_check=sanity_check,
        callbacks=settings or {},
        profile=profile or plain.profile,
        trainer=replace(plain.trainer, log_every_steps=log_every_steps, clip_grad_norm=clip_grad_norm),
        evaluation=replace(plain.evaluation, every_steps=evaluate_every_steps),
        health=replace(plain.health, on_nonfinite=on_nonfinite, check_replicas_every_steps=check_replicas_every_steps),
    )
    one_run = build_trainer(config, parts, state or TrainState(), world or alone(), RunServices(**services))
    one_run.train_step.begin_window()  # for tests that take steps without `train`
    return one_run


@cache
def _plain() -> RunConfig:
    return checked()


def manifest(step: int, **changes: Any) -> Manifest:
    """Return the manifest of a checkpoint of one rank."""
    files = {"rank_00000.safetensors": FileEntry(bytes=8, xxh3_128="ab")}
    facts = {"world_size": 1, "config_sha256": "abc", "torch": "2.10", "metrics": {}, "ranked_by": None, "files": files}
    return Manifest(step=step, **facts | changes)


def saved(folder: Path, step: int, parts: Components, metrics: Mapping[str, Any] | None = None) -> Path:
    """Save a checkpoint as a run does, and return it."""
    saver = Saver(folder=folder, world=alone(), config_hash="abc")
    saver.save(checkpoint_content(parts, TrainState(step=step, samples=step * 32), WindowSums(), alone()), metrics=metrics, ranked_by=LOSS)
    assert saver.finish() == ""
    return folder / f"step_{step:08d}"
