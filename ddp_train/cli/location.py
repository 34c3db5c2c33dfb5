"""Finds the folder of a run or a sweep (a new one, a typed one, or that of one that is continued), and claims or locks it.

Before a folder is claimed, what the run begins with is checked (`require_pipeline`): the runs before it (only SLURM waits for them), its
weights, its labels.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from ddp_train.checkpoint import catalog
from ddp_train.config.check import check_folder
from ddp_train.config.rules.training import missing_labels
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import changes
from ddp_train.config.spelling import override
from ddp_train.config.tree import texts
from ddp_train.errors import ConfigError, ConfigErrors, EnvironmentRefuses
from ddp_train.run_folder.claim import claim_new, claim_typed
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.trust import check_below, check_pattern, require_trust
from ddp_train.run_folder.verdict import Outcome, Verdict, verdict_of
from ddp_train.system.folder_lock import lock
from ddp_train.system.process_env import is_torchrun_worker

_BY_THE_SHELL = "`ddp-train ... && ddp-train ...`: the shell starts the second command when the first is done"


class Location(NamedTuple):
    """The folder of a run or a sweep, and how a command gets it."""

    folder: Path
    key: str  # the config key that says so
    is_new: bool  # it was not typed: it is made, under another name where it exists
    is_continued: bool  # there is a run or a sweep in it, which goes on

    def claim_for_run(self, checked: RunConfig) -> Path:
        """Claim the folder for a run, or lock that of the run which goes on; return which one it is."""
        if not self.is_continued:
            return self._claim()
        lock_run(self.folder, key=self.key)
        self.require_same(checked)
        return self.folder

    def claim_for_sweep(self) -> Path:
        """Claim the folder for a sweep, or lock that of the sweep which goes on; return which one it is."""
        if not self.is_continued:
            return self._claim()
        self._require_trust()
        lock(self.folder, key=self.key)
        return self.folder

    def require_same(self, checked: RunConfig) -> None:
        """Refuse (ConfigError) to continue a run that is not the user's own, or under a configuration that would give other results."""
        self._require_trust()
        if changed := changes(checked, self.folder):
            happened = f"the run in {self.folder} has a different configuration:\n    " + "\n    ".join(changed[:12])
            fix = f"`ddp-train resume {self.folder}` uses the saved one (overrides may follow); or start a new run in another folder"
            raise ConfigError(key=self.key, happened=happened, expected="the configuration of the run", fix=fix)

    def _require_trust(self) -> None:
        require_trust(self.folder, key=self.key, accept=f"ddp-train resume {self.folder} --trust")

    def _claim(self) -> Path:
        return claim_new(self.folder) if self.is_new else claim_typed(self.folder, key=self.key)


def lock_run(folder: Path, *, key: str, within_s: float = 0.0) -> None:
    """Lock the folder of a run that goes on; for a sweep's job that of the sweep, which may start the job at any time.

    `within_s`: how long to wait for a process that is just ending. Raises ConfigError: another process or an engine has the run.
    """
    if not is_torchrun_worker():
        from ddp_train.launch.submit import require_ended

        require_ended(folder)
    from ddp_train.run_folder.sweep import sweep_of

    lock(sweep_of(folder) or folder, key=key, within_s=within_s)


def location_of(composed: DictConfig, checked: RunConfig) -> Location:
    """Return the location of a run; change nothing on the disk."""
    if checked.resume not in ("auto", "never"):
        from ddp_train.cli.saved_run import run_of  # with what changes a saved configuration

        return Location(folder=run_of(Path(checked.resume)), key="resume", is_new=False, is_continued=True)
    return _location(composed, "run", is_there=lambda folder: checked.resume == "auto" and RunFolder(folder).config.exists())


def location_of_sweep(composed: DictConfig) -> Location:
    """Return the location of a sweep; change nothing on the disk."""
    return _location(composed, "sweep", is_there=is_sweep)


def _location(composed: DictConfig, name: str, *, is_there: Callable[[Path], bool]) -> Location:
    """Return the folder that the pattern hydra.NAME.dir comes to; no value in it, and no link below its first folders, leads out."""
    key, section = f"hydra.{name}.dir", composed.hydra[name]
    is_typed, folder = bool(_typed(composed, key)), str(section.dir)
    pattern = str(OmegaConf.to_container(section, resolve=False)["dir"])  # type: ignore[call-overload, index]
    problems = [*check_pattern(pattern, folder, key=key), *check_folder(folder, key=key)]
    fixed = os.path.dirname(pattern.partition("${")[0])
    path = Path(folder).absolute()
    if not problems and not is_typed and fixed:
        problems = check_below(Path(fixed).absolute(), path, key=key)
    if problems:
        raise ConfigErrors(problems)
    return Location(folder=path, key=key, is_new=not is_typed, is_continued=is_typed and is_there(path))


def typed_run_folder(composed: DictConfig) -> str:
    """Return the run folder that was typed; "" where none was: each machine would make a name of its own, by its clock."""
    if not (typed := _typed(composed, "hydra.run.dir")):
        return ""
    return typed[-1] if "${" in typed[-1] else str(Path(composed.hydra.run.dir).absolute())


def _typed(composed: DictConfig, key: str) -> list[str]:
    """Return the typed values of a key of the section `hydra`; the last one counts."""
    return [text.partition("=")[2] for text in texts(composed.hydra.overrides.hydra) if text.lstrip("+").startswith(f"{key}=")]


def require_pipeline(config: RunConfig, *, begins: bool = True) -> None:
    """Check that a run can begin: it waits for runs, its weights exist or will exist, and its data has labels.

    `begins`: False: it has begun already; its initial weights may be gone.
    Raises ConfigErrors: with every problem. EnvironmentRefuses: a run that it waits for will never be done.
    """
    waits_for = config.runs_before()
    launcher = "torchrun" if is_torchrun_worker() else config.cluster.launcher
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
    """Return the verdict on a run, which is done or goes on. EnvironmentRefuses: it will never be done."""
    verdict = verdict_of(RunFolder(folder))
    if verdict.outcome == Outcome.NEVER:
        happened = f"{RunFolder(folder).as_typed()} will not finish: {verdict.reason}"
        raise EnvironmentRefuses(key="after", happened=happened, expected="a run that is done, queued or running")
    return verdict


def _run_errors(folders: list[Path]) -> Iterator[ConfigError]:
    for folder in folders:
        if not RunFolder(folder).config.is_file():
            expected = "a folder with config.yaml, or several: [RUN1,RUN2]; of a sweep those of its jobs"
            yield ConfigError(key="after", happened=f"{folder} is not a run folder", expected=expected)


def _weight_errors(path: Path, waits_for: list[Path], *, launcher: str) -> Iterator[ConfigError]:
    """Refuse a file without weights, and a run that has saved none, unless it will have saved before this one begins."""
    run = path.parent.parent if path.name in (catalog.BEST, catalog.LAST) else path
    is_run = RunFolder(run).config.is_file()
    if not is_run and not waits_for and (launcher == "local" or path.exists()):  # else another machine may have the file
        try:
            from ddp_train.checkpoint.foreign_form import require_known_form  # with zipfile

            require_known_form(path)
        except ConfigError as error:
            yield error
    if is_run and run.absolute() not in waits_for and not catalog.saved_checkpoints(RunFolder(run).checkpoints):
        waits = _waits(launcher)
        expected = "a run that has saved one" + (", or one that this run waits for" if waits else "")
        fix = f"{override('after', str(run))}, which begins when that run is done" if waits else _BY_THE_SHELL
        yield ConfigError(key="init_from", happened=f"{run} has no complete checkpoint yet", expected=expected, fix=fix)


def _waits(launcher: str) -> bool:
    from ddp_train.launch.engine.engine import has_queue  # which most runs do not need

    return has_queue(launcher)
