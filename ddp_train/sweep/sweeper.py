"""What Hydra's sweeper makes of a command: its keys and jobs, how one is composed and recorded; and what Optuna's sweeper needs besides.

Optuna itself is imported only when a sweep is continued.
"""

from __future__ import annotations

import copy
import itertools
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ddp_train.config.hydra_internals import BASIC_SWEEPER
from ddp_train.config.tree import texts
from ddp_train.errors import ConfigError
from ddp_train.run_folder.sweep import Sweep

_TAKEN_UP = "suggested again after a stop"  # an attribute of a trial of Optuna's
_MAX_FILES = 10_000  # below a folder of YAML; more are data


def swept_keys(base: DictConfig) -> list[str]:
    """Return the keys for which the command gives several values."""
    return [override.key_or_group for override in OverridesParser.create().parse_overrides(_given(base)) if override.is_sweep_override()]


def planned_overrides(loader: Any, base: DictConfig) -> list[list[str]] | None:
    """Return the overrides of each job, as Hydra's own sweeper makes them; None: another sweeper decides as it goes."""
    if base.hydra.sweeper._target_ != BASIC_SWEEPER:
        return None
    values: dict[str, list[str]] = {}
    for each in OverridesParser.create(config_loader=loader).parse_overrides(_given(base)):
        key = each.get_key_element()
        found = each.sweep_string_iterator() if each.is_sweep_override() else [each.get_value_element_as_str()]
        values[key] = [f"{key}={value}" for value in found]
    return [list(overrides) for overrides in itertools.product(*values.values())]


def plans_all(base: DictConfig) -> bool:
    """Tell whether one call of `launch` has all jobs."""
    return base.hydra.sweeper._target_ == BASIC_SWEEPER and base.hydra.sweeper.max_batch_size is None


def compose_job(loader: Any, base: DictConfig, overrides: list[str], number: int) -> DictConfig:
    """Compose the job of this number, which is Hydra's present one from then on."""
    composed: DictConfig = loader.load_sweep_config(base, overrides)
    with read_write(composed), open_dict(composed):
        composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}
    with read_write(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir))
    return composed


def save_as_hydra(composed: DictConfig, folder: Path) -> None:
    """Write a job's config.yaml, hydra.yaml and overrides.yaml, as Hydra does for a run."""
    folder.mkdir(parents=True, exist_ok=True)  # there when an earlier attempt was killed before sweep.json had the job
    config = copy.deepcopy(composed)
    with read_write(config), open_dict(config):
        hydra_config = OmegaConf.create({"hydra": config.pop("hydra")})
    OmegaConf.save(config, folder / "config.yaml")
    OmegaConf.save(hydra_config, folder / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(texts(composed.hydra.overrides.task)), folder / "overrides.yaml")


def freeze_yaml(loader: Any, base: DictConfig, folder: Path) -> None:
    """Make Hydra's loader read copies of the YAML files: an edit must not reach the later jobs of a sweeper that decides as it goes.

    Args:
        loader: Hydra's, whose search path is changed.
        base: what the jobs are composed from; a search path in it is changed too.
        folder: where the copies lie. Those of an earlier attempt are used again.
    """
    for number, element in enumerate(loader.config_search_path.get_path()):
        element.path = _copy_yaml(element.path, folder / f"path_{number}")
    more = [_copy_yaml(path, folder / f"searchpath_{number}") for number, path in enumerate(base.hydra.searchpath)]
    loader.repository.initialize_sources(loader.config_search_path)
    if more:
        with read_write(base.hydra), open_dict(base.hydra):
            base.hydra.overrides.hydra.append(f"hydra.searchpath={more}")


def _given(base: DictConfig) -> list[str]:
    """Return what a sweeper starts from: its own parameters, then what was typed."""
    return [f"{key}={value}" for key, value in (base.hydra.sweeper.get("params") or {}).items()] + texts(base.hydra.overrides.task)


def _copy_yaml(path: str, copied: Path) -> str:
    """Copy the YAML files below an element of Hydra's search path, unless that is done; return the element to use."""
    scheme, separator, original = path.partition("://")
    if not separator:
        scheme, original = "file", path
    if scheme != "file" or not Path(original).is_dir() or str(copied) == original:
        return path
    if not copied.exists():
        files = list(itertools.islice(Path(original).rglob("*"), _MAX_FILES + 1))
        if copied.is_relative_to(original) or len(files) > _MAX_FILES:
            why = "has too many files" if len(files) > _MAX_FILES else "has the sweep below it"
            print(f"{original} {why}, so no copy is kept: do not edit its YAML while the sweep runs", file=sys.stderr)
            return path
        unfinished = copied.with_name(f".{copied.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        for file in files:
            if file.suffix in (".yaml", ".yml"):
                target = unfinished / file.relative_to(original)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        unfinished.mkdir(parents=True, exist_ok=True)
        unfinished.rename(copied)
    return f"file://{copied}"


def is_optunas(composed: DictConfig) -> bool:
    """Tell whether the sweeper is Optuna's."""
    return str(composed.hydra.sweeper._target_).endswith(".OptunaSweeper")


def prepare_optuna(composed: DictConfig, folder: Path, goal: str | None, *, is_taken_up: bool) -> None:
    """Complete the config of Optuna's plugin (hydra/sweeper=optuna): its direction, and a storage in the sweep's folder.

    The plugin suggests the values and reads what the jobs return. It knows nothing of interruptions: it would run all its trials again.

    Args:
        goal: min or max, as `sweep.direction` or the objective says; None: not known.
        is_taken_up: the sweep was stopped, and is continued.

    ConfigError: it is not known in which direction to go.
    """
    sweeper = composed.hydra.sweeper
    given = [str(text).lstrip("+").partition("=")[0] for text in composed.hydra.overrides.hydra]

    def is_given(name: str) -> bool:
        return f"hydra.sweeper.{name}" in given

    with read_write(composed.hydra), open_dict(composed.hydra):
        if not is_given("direction"):
            if goal is None:
                happened = "is not given, and the objective does not say which way its metric is better"
                raise ConfigError(key="sweep.direction", happened=happened, expected="minimize or maximize", fix="sweep.direction=maximize")
            sweeper.direction = {"min": "minimize", "max": "maximize"}[goal]
        if sweeper.storage is None:
            sweeper.storage = f"sqlite:///{folder}/optuna.db"
        if sweeper.study_name is None:
            sweeper.study_name = composed.name
        if not is_given("n_jobs"):
            sweeper.n_jobs = composed.sweep.parallel_jobs
        if not is_given("max_failure_rate") and composed.sweep.on_failure != "stop":
            sweeper.max_failure_rate = 1.0
        if is_taken_up:
            done = _resume_study(str(sweeper.storage), str(sweeper.study_name), [set(job.overrides) for job in Sweep.load(folder).jobs])
            sweeper.n_trials -= done
            if sweeper.sampler.get("seed") is not None:
                sweeper.sampler.seed += done  # the same one would suggest what it suggested at the start


def _resume_study(storage: str, study_name: str, jobs: list[set[str]]) -> int:
    """Return how many trials of this sweep are done, and have those suggested again whose result the study never got.

    The launcher knows the jobs of those, by their identity: one that is completed is not run again.

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
            optuna.trial.Trial(study, trial._trial_id).set_user_attr(_TAKEN_UP, True)
            study.tell(trial.number, state=state.FAIL)
            study.enqueue_trial(trial.params)
    return sum(trial.state in (state.COMPLETE, state.PRUNED, state.FAIL) and _TAKEN_UP not in trial.user_attrs for trial in trials)
