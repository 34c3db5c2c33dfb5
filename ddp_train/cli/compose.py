"""From the words of a command line to its run. Hydra composes here, in one process per job, and nowhere else.

`compose_and_run` gives the command to Hydra as a `HydraSession`. What Hydra calls, in this order:

    a single run   `claim_run`, before it makes the folder; then `run_composed`, whose job the `JobRunner` runs
    a sweep        `claim_sweep`; then `launch` with each batch of jobs that the sweeper asks for
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, env_override
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ddp_train import CONF
from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.cli.check_process import check_in_torch_process
from ddp_train.cli.location import location_of, location_of_sweep, require_pipeline, typed_run_folder
from ddp_train.config.check import checked_section
from ddp_train.config.command.command_line import options_of
from ddp_train.config.hydra_internals import MAIN, composing_once
from ddp_train.config.rules.sections import check_copies
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import config_text
from ddp_train.config.schema import ClusterConfig, SweepConfig
from ddp_train.config.tree import leaves, texts
from ddp_train.errors import DONE, ConfigError, ConfigErrors
from ddp_train.launch.job import Job, Training
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.system.process_env import is_torchrun_worker

if TYPE_CHECKING:
    from ddp_train.sweep.hydra_jobs import Multirun

_OUR_LAUNCHER = "hydra_plugins.ddp_train_launcher.DdpTrainLauncher"


def compose_and_run(words: list[str], runner: JobRunner, *, change: Callable[[Job], Job] = lambda job: job) -> int:
    """Let Hydra compose a command line, run the job or the sweep, and return the exit code. `change` may replace a job before it runs."""
    sys.argv[1:] = words  # Hydra reads them there alone
    session = ClaimBeforeFolder.session = HydraSession(words, runner, change)
    # With that variable Hydra raises its errors, and prints none.
    with suppress(_LeaveHydra), env_override({"HYDRA_FULL_ERROR": "1"}), composing_once(), closing(session):
        hydra.main(**MAIN, config_path=str(CONF), config_name="config")(session.run_composed)()
    if session.error is not None:
        raise session.error
    return session.exit_code


class HydraSession:
    """A command while Hydra has it: what is claimed, what Hydra runs, and how it has ended."""

    def __init__(self, words: list[str], runner: JobRunner, change: Callable[[Job], Job]) -> None:
        self._words, self._runner, self._change = words, runner, change
        self._checked: RunConfig | None = None  # of a single run whose folder is claimed
        self._checked_values: Any = None  # what was checked (`_without_hydra`)
        self._multirun: Multirun | None = None
        self.exit_code = DONE
        self.error: Exception | None = None  # of a callback: Hydra would turn it into a warning, and go on

    def before_folder(self, claim: Callable[[DictConfig], int | None], composed: DictConfig) -> None:
        """Call `claim_run` or `claim_sweep`. Leaves Hydra where that fails, or returns the exit code: the work was another machine's."""
        try:
            code = claim(composed)
        except Exception as error:
            self.error = error
            raise _LeaveHydra from None
        if code is not None:
            self.exit_code = code
            raise _LeaveHydra

    def claim_run(self, composed: DictConfig) -> int | None:
        """Check a single run, meet the other machines, claim the folder and tell Hydra which one it is."""
        checked = check_composed(composed, composed.hydra, trains_here=_starts_ranks_here(composed))
        if (code := self._runner.meet_machines(checked, run=typed_run_folder(composed))) is not None:
            return code
        location = location_of(composed, checked)
        folder = location.claim_for_run(checked)
        with read_write(composed.hydra), open_dict(composed.hydra):
            composed.hydra.run.dir = str(folder)
            if location.is_continued:
                composed.hydra.output_subdir = None  # `.hydra` says how the run was started, once
        self._checked = checked
        self._checked_values = _without_hydra(composed)
        return None

    def run_composed(self, composed: DictConfig) -> None:
        """Run a single run, in the folder that is claimed for it.

        It is checked again if `claim_run` has not checked these values: our callback was deleted, a value refers to the folder, or another
        callback has changed a value.
        """
        hydra_config: Any = HydraConfig.get()
        checked = self._checked
        if checked is None or self._checked_values is None or self._checked_values != _without_hydra(composed):
            checked = check_composed(composed, hydra_config, trains_here=_starts_ranks_here(composed))
        job = job_of(checked, hydra_config, Path(hydra_config.runtime.output_dir))
        job.run_folder.record_config(config_text(job.config, job.run_folder.root))
        self.exit_code = self._runner.run_to_end(self._change(job))

    def claim_sweep(self, composed: DictConfig) -> int | None:
        """Claim the folder of a sweep, or continue it; its jobs are checked when they are composed."""
        from ddp_train.launch import machines  # with what starts other machines, which takes its time to import
        from ddp_train.sweep import sweeper

        require_our_launcher(composed)
        cluster = checked_section(composed, ClusterConfig)
        if errors := list(check_copies(cluster, os.environ)):
            raise ConfigErrors(errors)  # before anything is claimed
        if (code := machines.take_part_in_sweep(cluster, self._words)) is not None:
            return code
        folder = location_of_sweep(composed).claim_for_sweep()
        fix_sweep_folder(composed, folder)
        sweeper.prepare_optuna(composed, folder)
        return None

    def launch(self, context: HydraContext, base: DictConfig, job_overrides: Sequence[list[str]]) -> Sequence[JobReturn]:
        """Run jobs that a sweeper asks for (`hydra_plugins`)."""
        from ddp_train.cli.saved_run import frozen_job
        from ddp_train.run_folder.sweep import Sweep
        from ddp_train.sweep.hydra_jobs import Multirun  # with its table and its engines: what a single run has no use for

        if self._multirun is None:
            root = Path(base.hydra.sweep.dir)
            sweep = Sweep.load(root) if is_sweep(root) else Sweep(root=root, command=self._words)
            self._multirun = Multirun(sweep, checked_section(base, SweepConfig), self._runner, check_composed)
            self._multirun.resume(lambda folder: frozen_job(folder, [], in_sweep=True), is_asked=True)
        returns = self._multirun.launch(context, base, job_overrides) if self._multirun.end_code is None else []
        if self._multirun.end_code is not None:
            raise _LeaveHydra
        return returns

    def close(self) -> None:
        if self._multirun is not None:
            self._multirun.close()
            self.exit_code = self._multirun.exit_code()  # an engine may have told of a failure only then


class ClaimBeforeFolder(Callback):
    """Claims before Hydra makes a folder (Hydra itself takes any that exists). Hydra makes this callback, which conf/config.yaml names."""

    session: ClassVar[HydraSession]

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.session.before_folder(self.session.claim_run, config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.session.before_folder(self.session.claim_sweep, config)


class _LeaveHydra(BaseException):
    """Leaves Hydra, which catches every `Exception` of a callback, and whose sweeper would ask for more jobs."""


def job_of(checked: RunConfig, hydra_config: DictConfig, folder: Path) -> Job:
    """Return the job of what was composed and checked; the section `hydra` says what was typed."""
    resume = Path(checked.resume)
    return Job(
        config=checked,
        run_folder=RunFolder(folder),
        command=list(sys.argv),
        overrides=texts(hydra_config.overrides.task),
        options=options_of(hydra_config),
        work=Training(checkpoint=str(resume.absolute()) if is_checkpoint(resume) else None),
    )


def check_composed(composed: DictConfig, hydra_config: DictConfig, *, trains_here: bool = False) -> RunConfig:
    """Check what Hydra composed, without the section `hydra`, and return it resolved.

    `trains_here`: when nothing is wrong, ranks of this machine come next: what they need may be imported for the check.
    """
    job_config = composed.copy()
    if "hydra" in job_config:
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}, which Hydra itself resolves only later
        with read_write(job_config), open_dict(job_config):
            del job_config["hydra"]
            if hydra_config.job.env_set and "cluster" in job_config:  # Hydra's own way to say it, which reaches this process alone
                job_config.cluster.env = {**hydra_config.job.env_set, **(job_config.cluster.env or {})}
    if hydra_config.job.chdir:
        expected = "false: ranks start in your current folder, where they find your modules and data"
        raise ConfigError(key="hydra.job.chdir", happened="is true", expected=expected)
    checked = check_in_torch_process(job_config, hydra=hydra_config, trains_here=trains_here)
    require_pipeline(checked, begins=checked.resume in ("auto", "never") and not RunFolder(Path(hydra_config.run.dir)).config.exists())
    return checked


def _starts_ranks_here(composed: DictConfig) -> bool:
    return OmegaConf.select(composed, "cluster.launcher") == "local" and not is_torchrun_worker()


def _without_hydra(config: DictConfig) -> Any:
    """Return a config as composed, without its section `hydra`; None where it refers to that, which changes with the run's folder."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    values.pop("hydra", None)
    return None if any("${" in str(value) and "hydra" in str(value) for _, value in leaves(values)) else values


def require_our_launcher(composed: DictConfig) -> None:
    """Refuse a launcher of Hydra's, or of a plugin, for the jobs of a sweep. ConfigError: it is not ours."""
    if composed.hydra.launcher._target_ != _OUR_LAUNCHER:
        raise ConfigError(key="hydra/launcher", happened="is not ours", expected="hydra/launcher=ddp_train, which runs any sweeper's jobs")


def fix_sweep_folder(composed: DictConfig, folder: Path) -> None:
    """Let all jobs of a sweep have the same folder above theirs."""
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.sweep.dir = str(folder)
        composed.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")  # jobs compose again, from these overrides
