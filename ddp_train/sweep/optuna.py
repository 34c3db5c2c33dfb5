"""What Optuna's Hydra plugin needs to serve our sweeps: a storage in the sweep's folder, a direction, and its own trials after a stop.

Hydra's plugin (hydra/sweeper=optuna) suggests the values and reads what the jobs return. It knows nothing of interruptions: it would run
all its trials again. Optuna itself is imported only when a sweep is continued.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict, read_write

from ddp_train.errors import ConfigError
from ddp_train.run_folder.sweep import Sweep

_TAKEN_UP = "suggested again after a stop"


def is_chosen(composed: DictConfig) -> bool:
    """Tell whether the sweeper is Optuna's."""
    return str(composed.hydra.sweeper._target_).endswith(".OptunaSweeper")


def prepare(composed: DictConfig, folder: Path, goal: str | None, *, is_taken_up: bool) -> None:
    """Complete the sweeper's config where the user left it as the plugin has it.

    Args:
        folder: the sweep's.
        goal: min or max, as `sweep.direction` or the objective says; None: not known.
        is_taken_up: the sweep was stopped, and is continued.

    Raises:
        ConfigError: it is not known in which direction to go.
    """
    sweeper = composed.hydra.sweeper
    given = [str(text).lstrip("+").partition("=")[0] for text in composed.hydra.overrides.hydra]

    def is_given(name: str) -> bool:
        return f"hydra.sweeper.{name}" in given

    with read_write(composed.hydra), open_dict(composed.hydra):
        if not is_given("direction"):
            if goal is None:
                raise ConfigError(
                    key="sweep.direction",
                    happened="is not given, and the objective does not say which way its metric is better",
                    expected="minimize or maximize",
                    fix="sweep.direction=maximize",
                )
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

    Args:
        jobs: the overrides of the sweep's jobs. Another sweep may have trials in the same study.
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
