"""Check, before a folder is claimed, what a run begins with: the runs before it (only SLURM waits for them), its weights, its labels."""

from collections.abc import Iterator
from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.config.rules.training import missing_labels
from ddp_train.config.run_config import RunConfig
from ddp_train.config.spelling import override
from ddp_train.errors import ConfigError, ConfigErrors, EnvironmentRefuses
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.verdict import Outcome, Verdict, verdict_of
from ddp_train.system.torchrun_env import is_torchrun_worker

_BY_THE_SHELL = "`ddp-train ... && ddp-train ...`: the shell starts the second command when the first is done"


def require_pipeline(config: RunConfig, *, begins: bool = True) -> None:
    """Check that a run can begin: it waits for runs, its weights exist or will exist, and its data has labels.

    `begins`: False: it has begun already; its initial weights may be gone.

    Raises ConfigErrors: with every problem.
    Raises EnvironmentRefuses: a run that it waits for never gets done.
    """
    waits_for, launcher = config.runs_before(), "torchrun" if is_torchrun_worker() else config.cluster.launcher
    if waits_for and not _waits(launcher):
        happened = f"{launcher} starts this run at once and waits for no other run"
        raise ConfigError(key="after", happened=happened, expected="null, or cluster=slurm: SLURM waits by itself", fix=_BY_THE_SHELL)
    weights = Path(config.init_from) if config.init_from is not None and begins else None
    errors = [*_run_errors(waits_for), *(_weight_errors(weights, waits_for, launcher=launcher) if weights else ()), *missing_labels(config)]
    if errors:
        raise ConfigErrors(errors)
    for folder in waits_for:
        verdict_to_wait_for(folder)


def verdict_to_wait_for(folder: Path) -> Verdict:
    """Return the verdict on a run: it is done, or goes on. EnvironmentRefuses: it never gets done."""
    verdict = verdict_of(RunFolder(folder))
    if verdict.outcome == Outcome.NEVER:
        happened = f"{RunFolder(folder).as_typed()} will not finish: {verdict.reason}"
        raise EnvironmentRefuses(key="after", happened=happened, expected="a run that is done, queued or running")
    return verdict


def _run_errors(folders: list[Path]) -> Iterator[ConfigError]:
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            from ddp_train.run_folder.sweep import Sweep  # for a mistake

            jobs = [str(folder / job.folder) for job in Sweep.load(folder).jobs] if is_sweep(folder) else []
            happened = f"{folder} is the folder of a sweep" if jobs else f"{folder} is not a run folder"
            fix = override("after", jobs) if jobs else ""
            yield ConfigError(key="after", happened=happened, expected="a folder with config.yaml, or several", fix=fix)


def _weight_errors(path: Path, waits_for: list[Path], *, launcher: str) -> Iterator[ConfigError]:
    """Refuse a file without weights, and a run that has saved none, unless it will have saved before this one begins."""
    run = path.parent.parent if path.name in (catalog.BEST, catalog.LAST) else path
    is_run = (run / "config.yaml").is_file()
    if not is_run and not waits_for and (launcher == "local" or path.exists()):  # else another machine may have the file
        try:
            from ddp_train.checkpoint.foreign_form import require_known_form  # with zipfile

            require_known_form(path)
        except ConfigError as error:
            yield error
    if is_run and run.absolute() not in waits_for and not catalog.saved_checkpoints(run / "checkpoints"):
        waits = _waits(launcher)
        expected = "a run that has saved one" + (", or one that this run waits for" if waits else "")
        fix = f"{override('after', str(run))}, which begins when that run is done" if waits else _BY_THE_SHELL
        yield ConfigError(key="init_from", happened=f"{run} has no complete checkpoint yet", expected=expected, fix=fix)


def _waits(launcher: str) -> bool:
    from ddp_train.launch.engine.engine import has_queue  # which most runs do not need

    return has_queue(launcher)
