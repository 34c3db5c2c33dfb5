"""Hydra's sweeper: the keys and jobs of a command, how a job is composed and recorded, and additions for Optuna's sweeper.

Optuna itself is imported only when a sweep is continued.
"""

import copy
import itertools
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ddp_train.config.check import checked_section
from ddp_train.config.hydra_internals import BASIC_SWEEPER
from ddp_train.config.schema import SweepConfig
from ddp_train.config.targets.locate import locate
from ddp_train.config.tree import texts
from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.sweep import GOALS, Sweep

_ENQUEUED_AGAIN = "suggested again after a stop"  # an attribute of a trial of Optuna's


def swept_keys(base: DictConfig) -> list[str]:
    overrides = OverridesParser.create().parse_overrides(_overrides(base))
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def planned_overrides(loader: Any, base: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job, as Hydra's own sweeper makes them; None: another sweeper chooses them one after the other."""
    if base.hydra.sweeper._target_ != BASIC_SWEEPER:
        return None
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create(config_loader=loader).parse_overrides(_overrides(base)):
        key = override.get_key_element()
        values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return [list(overrides) for overrides in itertools.product(*choices.values())]


def plans_all(base: DictConfig) -> bool:
    """Tell whether one call of `launch` has all jobs."""
    return base.hydra.sweeper._target_ == BASIC_SWEEPER and base.hydra.sweeper.max_batch_size is None


def compose_job(loader: Any, base: DictConfig, overrides: list[str], number: int) -> DictConfig:
    """Compose the job of this number, and make it Hydra's current job."""
    composed: DictConfig = loader.load_sweep_config(base, overrides)
    with read_write(composed), open_dict(composed):
        composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}
    with read_write(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir))
    return composed


def save_as_hydra(composed: DictConfig, folder: Path) -> None:
    """Write a job's config.yaml, hydra.yaml and overrides.yaml, as Hydra does for a run."""
    folder.mkdir(parents=True, exist_ok=True)  # it exists when an earlier attempt was killed before sweep.json had the job
    config = copy.deepcopy(composed)
    with read_write(config), open_dict(config):
        OmegaConf.save(OmegaConf.create({"hydra": config.pop("hydra")}), folder / "hydra.yaml")
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create(texts(composed.hydra.overrides.task)), folder / "overrides.yaml")


def use_copied_yaml(loader: Any, base: DictConfig, folder: Path) -> None:
    """Let Hydra's loader and the base config read copies of the YAML: an edit must not reach the later jobs of the sweep.

    `folder`: for the copies; those of an earlier attempt are used again.
    """
    for number, element in enumerate(loader.config_search_path.get_path()):
        element.path = _copy_yaml(element.path, folder / f"path_{number}")
    searchpath = [_copy_yaml(path, folder / f"searchpath_{number}") for number, path in enumerate(base.hydra.searchpath)]
    loader.repository.initialize_sources(loader.config_search_path)
    if searchpath:
        with read_write(base.hydra), open_dict(base.hydra):
            base.hydra.overrides.hydra.append(f"hydra.searchpath={searchpath}")


def _overrides(base: DictConfig) -> list[str]:
    """Return a sweeper's own parameters, then the typed overrides."""
    return [f"{key}={value}" for key, value in (base.hydra.sweeper.get("params") or {}).items()] + texts(base.hydra.overrides.task)


def _copy_yaml(path: str, copied: Path) -> str:
    """Copy the YAML files below an element of Hydra's search path, unless that is done; return the element to use."""
    scheme, separator, original = path.partition("://")
    if not separator:
        scheme, original = "file", path
    if scheme != "file" or not Path(original).is_dir() or str(copied) == original:
        return path
    if copied.is_relative_to(original):
        print(f"{original} has the sweep below it, so it is not copied: do not edit its YAML while the sweep runs", file=sys.stderr)
        return path
    if not copied.exists():
        unfinished = copied.with_name(f".{copied.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(original, unfinished, ignore=_all_but_yaml)
        unfinished.rename(copied)
    return f"file://{copied}"


def _all_but_yaml(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith((".yaml", ".yml")) and not Path(folder, name).is_dir()]


def prepare_optuna(composed: DictConfig, folder: Path) -> None:
    """Complete the config of Optuna's plugin (hydra/sweeper=optuna): its direction, and a storage in the sweep's folder. Not of another.

    The plugin suggests the values and reads the jobs' results. It does not handle interruptions: it would run all its trials again.

    Raises ConfigError: the direction is not known.
    """
    sweeper = composed.hydra.sweeper
    if not str(sweeper._target_).endswith(".OptunaSweeper"):
        return
    typed_keys = [str(text).lstrip("+").partition("=")[0] for text in composed.hydra.overrides.hydra]
    with read_write(composed.hydra), open_dict(composed.hydra):
        if "hydra.sweeper.direction" not in typed_keys:
            if (goal := _goal(composed)) is None:
                happened = "is not given, and the objective does not define whether its metric should be low or high"
                raise ConfigError(key="sweep.direction", happened=happened, expected="minimize or maximize", fix="sweep.direction=maximize")
            sweeper.direction = {"min": "minimize", "max": "maximize"}[goal]
        if sweeper.storage is None:
            sweeper.storage = f"sqlite:///{folder}/optuna.db"
        if sweeper.study_name is None:
            sweeper.study_name = composed.name
        if "hydra.sweeper.n_jobs" not in typed_keys:
            sweeper.n_jobs = composed.sweep.parallel_jobs
        if "hydra.sweeper.max_failure_rate" not in typed_keys and composed.sweep.on_failure != "stop":
            sweeper.max_failure_rate = 1.0
        if is_sweep(folder):  # one that was stopped, and is continued
            num_done = _resume_study(str(sweeper.storage), str(sweeper.study_name), [set(job.overrides) for job in Sweep.load(folder).jobs])
            sweeper.n_trials -= num_done
            if sweeper.sampler.get("seed") is not None:
                sweeper.sampler.seed += num_done  # the same seed would suggest the first values again


def _goal(composed: DictConfig) -> str | None:
    """Return the goal of a sweep's metric (min or max), as far as it can be known before a job has run."""
    settings = checked_section(composed, SweepConfig)
    if settings.direction is not None:
        return GOALS[settings.direction]
    objective = locate(composed.objective._target_)
    goals: Mapping[str, str] = getattr(objective, "goals", {"loss": "min"} if objective.__module__.startswith("torch.nn") else {})
    name = (settings.metric or "").rpartition("/")[2] or next(iter(goals), "")
    if (metric_config := composed.evaluation.get("metrics", {}).get(name)) is not None and (path := metric_config.get("_target_")):
        higher = getattr(locate(path), "higher_is_better", None)
        return None if higher is None else "max" if higher else "min"
    return goals.get(name)


def _resume_study(storage: str, study_name: str, jobs: list[set[str]]) -> int:
    """Return the number of finished trials of this sweep; enqueue those again whose result the study never got.

    `jobs`: the overrides of the sweep's jobs. Another sweep may have trials in the same study.
    """
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)
    state = optuna.trial.TrialState
    study: Any = optuna.load_study(study_name=study_name, storage=storage)
    trials = [
        trial for trial in study.get_trials() if any({f"{key}={value}" for key, value in trial.params.items()} <= job for job in jobs)
    ]
    for trial in trials:
        if trial.state == state.RUNNING:
            optuna.trial.Trial(study, trial._trial_id).set_user_attr(_ENQUEUED_AGAIN, True)
            study.tell(trial.number, state=state.FAIL)
            study.enqueue_trial(trial.params)
    return sum(trial.state in (state.COMPLETE, state.PRUNED, state.FAIL) and _ENQUEUED_AGAIN not in trial.user_attrs for trial in trials)
