"""Runs that come after others (`after=RUN`): what can be told of them before anything is claimed. SLURM alone waits for other runs."""

from __future__ import annotations

from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.config.check import ConfigErrors
from ddp_train.config.run_config import RunConfig
from ddp_train.config.spelling import override
from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import Settled, Verdict, settle
from ddp_train.sweep.folder import Sweep, is_sweep
from ddp_train.system.torchrun_env import is_torchrun_worker

_BY_THE_SHELL = "`ddp-train ... && ddp-train ...`: the shell starts the second command when the first is done"


def check_pipeline(config: RunConfig) -> None:
    """Check that a run may once begin: what it waits for is a run, and what it takes its weights from has some or is waited for.

    Raises:
        ConfigErrors: with every problem.
        EnvironmentRefuses: a run that it waits for never gets done.
    """
    waits_for, launcher = config.runs_before(), "torchrun" if is_torchrun_worker() else config.cluster.launcher
    slurm_waits = launcher == "slurm"
    if waits_for and not slurm_waits:
        raise ConfigError(
            key="after",
            happened=f"{launcher} starts this run at once and waits for no other run",
            expected="null, or cluster=slurm: SLURM waits by itself",
            fix=_BY_THE_SHELL,
        )
    errors = [error for folder in waits_for if (error := _no_run(folder))]
    if config.init_from is not None and (error := _no_weights(Path(config.init_from), waits_for, slurm_waits=slurm_waits)):
        errors.append(error)
    if errors:
        raise ConfigErrors(errors)
    for folder in waits_for:
        require_possible(folder)


def require_possible(folder: Path) -> Settled:
    """Return the verdict on a run: it is done, or it will be.

    Raises:
        EnvironmentRefuses: it never will be.
    """
    settled = settle(RunFolder(folder))
    if settled.verdict == Verdict.NEVER:
        raise EnvironmentRefuses(
            key="after",
            happened=f"{RunFolder(folder).shown()} does not get done: {settled.reason}",
            expected="a run that is done, or on its way",
        )
    return settled


def _no_run(folder: Path) -> ConfigError | None:
    if (folder / "config.yaml").is_file():
        return None
    jobs = [str(folder / job.folder) for job in Sweep.load(folder).jobs] if is_sweep(folder) else []
    happened = f"{folder} is the folder of a sweep" if jobs else f"{folder} is no run folder"
    return ConfigError(
        key="after", happened=happened, expected="a folder that holds config.yaml, or several", fix=override("after", jobs) if jobs else ""
    )


def _no_weights(given: Path, waits_for: list[Path], *, slurm_waits: bool) -> ConfigError | None:
    """Refuse the weights of a run of ours that has saved none, unless they will be there when it is time."""
    run = given.parent.parent if given.name in (catalog.BEST, catalog.LAST) else given
    is_run = (run / "config.yaml").is_file()
    if not is_run or run.absolute() in waits_for or catalog.saved(run / "checkpoints"):
        return None
    return ConfigError(
        key="init_from",
        happened=f"{run} has no complete checkpoint yet",
        expected="a run that has saved one" + (", or one that this run waits for" if slurm_waits else ""),
        fix=f"{override('after', str(run))}, which begins when that run is done" if slurm_waits else _BY_THE_SHELL,
    )
