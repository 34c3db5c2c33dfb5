"""Build components in this process, as a run of one rank does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
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
from ddp_train.launch.job import Job
from ddp_train.model_log import values_of
from ddp_train.rank.train_job import RankRun
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.phase import Phases
from ddp_train.training.build.build import build
from ddp_train.training.build.trainer import build_trainer
from ddp_train.training.loop.hooks import Agreed, RunServices, StopLine
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.parts.components import Components
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Record, Records, RunEvent
from ddp_train.training.state.checkpoints import Checkpoints
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


class PassedRecords(Records):
    """Passes records to `to` and lines of times.jsonl to `times`, and drops the rest."""

    def __init__(self, to: Callable[[Record], object], times: Callable[[Mapping[str, Any]], object]) -> None:
        self.to, self.times = to, times
        self.last_values = dict[str, Any]()
        self.reports = list[RunEvent]()

    def write_times(self, line: Mapping[str, Any]) -> None:
        self.times(line)

    def write(self, record: Record) -> None:
        self.last_values |= values_of(record)
        self.to(record)

    def log_event(self, event: RunEvent, line: str) -> None:
        pass

    def show(self, name: str, value: Any, step: int) -> None:
        pass


class PassedSaves(Checkpoints):
    """Passes to `to` what is to be saved, after the steps that `is_due` chooses; has nothing to go back to."""

    def __init__(self, to: Callable[[WindowSums], object], is_due: Callable[[int], bool]) -> None:
        self.to = to
        self.is_due = is_due

    def decide(self, step: int, *, is_agreed: bool) -> bool:
        return self.is_due(step)

    def save(self, window: WindowSums) -> None:
        self.to(window)

    def rewind(self, cause: Rewind) -> None:
        raise cause


@dataclass
class ChosenStop:
    """Stops after a step, and an evaluation when `asks` says so."""

    last_step: int | None = None
    asks: Callable[[], bool] = lambda: False

    def agree_after(self, steps_run: int, /) -> Agreed:
        return Agreed(is_last_step=steps_run == self.last_step, is_save_agreed=False)

    def is_asked(self) -> bool:
        return self.asks()


def services(
    run_folder: RunFolder | None = None,
    phases: Phases | None = None,
    *,
    write: Callable[[Record], object] = lambda record: None,
    write_times: Callable[[Mapping[str, Any]], object] = lambda line: None,
    save: Callable[[WindowSums], object] = lambda window: None,
    decide_save: Callable[[int], bool] = lambda step: False,
    stop: StopLine | None = None,
) -> RunServices:
    """Return what a run has around it; by default nothing is written, saved or stopped."""
    return RunServices(
        run_folder=run_folder or RunFolder(Path()),
        phases=phases or Phases(),
        records=PassedRecords(write, write_times),
        checkpoints=PassedSaves(save, decide_save),
        stop=stop or ChosenStop(),
    )


def rank_run(job: Job, state: TrainState) -> RankRun:
    """Return what one rank that is alone has of a job that no signal stops."""
    no_stop: Any = None
    return RankRun(job=job, world=alone(), state=state, stop=no_stop, phases=Phases())


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
    **around: Any,
) -> Trainer:
    """Return what trains the components, with what their features add, in `services(**around)`."""
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
    return build_trainer(config, parts, state or TrainState(), world or alone(), services(**around))


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
    saver.save(checkpoint_content(parts, TrainState(step=step, position=step * 32), WindowSums(), alone()), metrics=metrics, ranked_by=LOSS)
    assert saver.finish() is None
    return folder / f"step_{step:08d}"
