"""Hydra's way to our sweeps: a Launcher plugin, so that any sweeper (Hydra's own, Optuna ...) drives multi-process jobs.

Hydra takes plugins from the namespace `hydra_plugins` only, and imports them whenever any Hydra application starts: hence this small file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig


class DdpTrainLauncher(Launcher):
    """Hands every batch of jobs that a sweeper asks for to `ddp_train.sweep.hydra_jobs`."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Take what Hydra gives to every launcher; `task_function` is a method of our session, which knows the sweep."""
        self._context, self._session, self._config = hydra_context, getattr(task_function, "__self__", None), config
        if not hasattr(self._session, "launch"):
            raise RuntimeError("hydra/launcher=ddp_train starts jobs of ddp-train only")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return what came of each, in their order."""
        returns: Sequence[JobReturn] = self._session.launch(self._context, self._config, [list(overrides) for overrides in job_overrides])
        return returns
