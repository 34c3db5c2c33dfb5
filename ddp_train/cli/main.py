"""The entry: Hydra composes here, in one process per job, and nowhere else. Imports no torch.

`run` gives every composed, checked and claimed job to a function: on the command line that one starts torchrun agents
(`launch`), under torchrun it hands the job to the group of ranks that is already there (`group`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ddp_train import __version__, launch
from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.cli.saved_run import changes, frozen_job, record, refuse_without_effect, run_of
from ddp_train.config import hydra_errors, limits
from ddp_train.config.check import CONF, ConfigErrors, RunConfig, check, check_overrides, options, section, texts
from ddp_train.config.target import locate
from ddp_train.errors import ConfigError
from ddp_train.exit_code import DONE, FAILED, INTERRUPTED, WRONG_INPUT
from ddp_train.job import Job
from ddp_train.launch.launcher import Slot
from ddp_train.run_folder.paths import RunDir, claim_given, claim_new, let_go
from ddp_train.run_folder.trust import check_below, check_pattern, require_own
from ddp_train.sweep import optuna as optuna_sweeper
from ddp_train.sweep.folder import RUNNING, Sweep, is_sweep, sweep_of
from ddp_train.sweep.hydra_jobs import MakeSlots, Multirun
from ddp_train.sweep.table import show
from ddp_train.system import devices
from ddp_train.system.folder_lock import held, hold, is_held


@dataclass(kw_only=True)
class Place:
    """Where jobs run: on this machine, or in the group of ranks that torchrun started."""

    run: Callable[[Job], int]  # one job, to its end; returns the exit code
    slots: MakeSlots  # for the jobs of a sweep
    has_begun: bool = False  # it has been given work: what goes wrong from now on is no mistake of the command line

    def begin(self, job: Job) -> int:
        """Run one job to its end and return the exit code."""
        self.has_begun = True
        return self.run(job)

    def begin_sweep(self, folder: Path, count: int) -> Sequence[Slot]:
        """Return the slots for the jobs of a sweep, which are run at once."""
        made = self.slots(folder, count)
        self.has_begun = True
        return made


_USAGE = {
    "resume": """ddp-train resume RUN [key=value ...]

  RUN            the folder of a run: it continues from its newest good checkpoint, under its own configuration;
                 one of its checkpoints (RUN/checkpoints/step_00001000, RUN/checkpoints/best): it continues from there;
                 the folder of a sweep: what it has not finished is run
  key=value      single values to change, as trainer.max_steps=2000; for a sweep those of sweep and cluster
""",
    "runs": """ddp-train runs SWEEP

  SWEEP          the folder of a sweep: its table is shown, the best job first
""",
}

_LET_GO_WITHIN_S = 120.0  # the lock of a rank that died: at once on one machine, with the lease of a network file system on another


def main() -> int:
    """Run the command line in the process that was typed, and return the exit code."""
    sys.path.insert(0, os.getcwd())  # components are importable from where the user stands, as with `python -m`
    return run(Place(run=launch.run, slots=launch.slots))


def run(place: Place) -> int:
    """Run what sys.argv asks for.

    Hydra's own interface stays as it is: --help, --cfg, --info, tab completion, -m with any sweeper.
    """
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if "--version" in sys.argv[1:]:
        print(f"ddp_train {__version__}")
        return DONE
    if command == ["prepare"]:
        return _report(lambda: _prepare(arguments), place)
    if command and command[0] in _USAGE and {"--help", "-h"} & set(arguments):
        print(_USAGE[command[0]])
        return DONE
    limits.install()
    if command == ["resume"]:
        return _report(lambda: _resume(arguments, place), place)
    if command == ["runs"]:
        return _report(lambda: _show(arguments), place)
    sys.argv[1:] = hydra_errors.options_first(sys.argv[1:])
    return _report(lambda: _compose(place), place)


def _compose(place: Place) -> int:
    """Let Hydra compose, and run each job that comes of it."""
    hydra_errors.refuse_unknown_options(sys.argv[1:])
    command = _Command(place)
    try:
        with _full_hydra_errors():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(command)()
    finally:
        command.close()
    return command.exit_code()


class _Command:
    """What Hydra calls: with the config of a single run or, through the plugin in `hydra_plugins`, with the jobs of a sweep."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._exit_code = DONE
        self._multirun: Multirun | None = None

    def __call__(self, composed: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ConfigError(
                key="hydra/launcher", happened="is not ours", expected="hydra/launcher=ddp_train, which runs any sweeper's jobs"
            )
        job = _job(composed, HydraConfig.get())
        record(job.run_dir, job.config)
        self._exit_code = self._place.begin(job)

    def launch(self, context: HydraContext, base: DictConfig, job_overrides: Sequence[list[str]]) -> Sequence[JobReturn]:
        """Run jobs that a sweeper asks for."""
        if self._multirun is None:
            root = Path(base.hydra.sweep.dir)
            sweep = Sweep.load(root) if is_sweep(root) else Sweep(root=root, command=sys.argv[1:])
            self._multirun = Multirun(sweep, section(base, "sweep"), self._place.begin_sweep, _check)
            self._multirun.take_up(lambda folder: frozen_job(folder, [], in_sweep=True), is_asked=True)
        return self._multirun.launch(context, base, job_overrides)

    def close(self) -> None:
        """End a sweep, however it ends."""
        if self._multirun is not None:
            self._multirun.close()

    def exit_code(self) -> int:
        """Return how it went."""
        return self._exit_code if self._multirun is None else self._multirun.exit_code()


def resume(folder: Path, place: Place) -> int:
    """Continue the run or the sweep that an earlier attempt of this group of ranks has left (under torchrun)."""
    return _report(lambda: _resume([str(folder)], place, is_restart=True), place)


class Checked(Callback):
    """Checks a config before Hydra makes its folder, and claims that folder (Hydra itself takes any that exists)."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check and claim for a single run."""
        with _exits_of_its_own():
            self._prepare(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the folder of a sweep, or take it up again; its jobs are checked when they are composed."""
        with _exits_of_its_own():
            if OmegaConf.select(config, "cluster.launcher") == "torchrun" and not devices.is_torchrun_worker():
                raise _Exit(launch.join(section(config, "cluster"), sys.argv[1:]))
            folder = _place(config.hydra.sweep, key="hydra.sweep.dir", is_typed=_is_overridden(config, "hydra.sweep.dir"))
            if not _is_overridden(config, "hydra.sweep.dir"):
                folder = claim_new(folder)
            elif is_sweep(folder):
                hold(folder, key="hydra.sweep.dir")
            else:
                folder = claim_given(folder, key="hydra.sweep.dir")
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.sweep.dir = str(folder)
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")  # jobs compose again, from these overrides
            if optuna_sweeper.is_chosen(config):
                optuna_sweeper.prepare(config, folder, _goal(config), is_taken_up=is_sweep(folder))

    def _prepare(self, composed: DictConfig) -> None:
        checked = _check(composed, composed.hydra)
        if checked.tree["cluster"]["launcher"] == "torchrun" and not devices.is_torchrun_worker():
            raise _Exit(launch.join(checked.tree["cluster"], sys.argv[1:]))  # global rank 0 composes and claims, wherever it is
        folder, is_resumed = _claim(composed, checked)
        with read_write(composed.hydra), open_dict(composed.hydra):
            composed.hydra.run.dir = str(folder)
            if is_resumed:
                composed.hydra.output_subdir = None  # `.hydra` says how the run was started, once


class _Exit(SystemExit):
    """Leaves Hydra with an exit code, and what to say."""

    def __init__(self, code: int, error: Exception | None = None) -> None:
        super().__init__(code)
        self.error = error


@contextmanager
def _exits_of_its_own() -> Iterator[None]:
    """Leave Hydra for any error: it turns the exceptions of a callback into warnings, and goes on."""
    try:
        yield
    except Exception as error:
        raise _Exit(WRONG_INPUT, error) from None


def _job(composed: DictConfig, hydra_config: Any) -> Job:
    checked = _check(composed, hydra_config)
    resume = Path(checked.tree["resume"])
    return Job(
        config=checked,
        run_dir=RunDir(Path(hydra_config.runtime.output_dir)),
        command=list(sys.argv),
        overrides=texts(hydra_config.overrides.task),
        options=options(hydra_config),
        checkpoint=str(resume.absolute()) if is_checkpoint(resume) else None,
    )


def _goal(composed: DictConfig) -> str | None:
    """Return which way the metric of a sweep is better (min or max), as far as it can be known before a job has run."""
    settings = section(composed, "sweep")
    if settings["direction"] is not None:
        return {"minimize": "min", "maximize": "max"}[settings["direction"]]
    objective = locate(composed.objective._target_)
    goals: Mapping[str, str] = getattr(objective, "goals", {"loss": "min"} if objective.__module__.startswith("torch.nn") else {})
    name = (settings["metric"] or "").rpartition("/")[2] or next(iter(goals), "")
    return goals.get(name)


def _check(composed: DictConfig, hydra_config: DictConfig) -> RunConfig:
    job_config = composed.copy()
    if "hydra" in job_config:
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}, which Hydra itself resolves only later
        with read_write(job_config), open_dict(job_config):
            del job_config["hydra"]
            if hydra_config.job.env_set and "cluster" in job_config:  # Hydra's own way to say it, which reaches this process alone
                job_config.cluster.env = {**hydra_config.job.env_set, **(job_config.cluster.env or {})}
    if hydra_config.job.chdir:
        raise ConfigError(
            key="hydra.job.chdir",
            happened="is true",
            expected="false: ranks stand where you stand, so that they find your modules and data",
        )
    return check(job_config, hydra=hydra_config)


def _claim(composed: DictConfig, checked: RunConfig) -> tuple[Path, bool]:
    """Return the run folder, ours alone, and whether a run in it is continued."""
    resume = checked.tree["resume"]
    if resume not in ("auto", "never"):
        return _continue(run_of(Path(resume)), checked, key="resume"), True
    is_typed = _is_overridden(composed, "hydra.run.dir")
    folder = _place(composed.hydra.run, key="hydra.run.dir", is_typed=is_typed)
    if not is_typed:
        return claim_new(folder), False
    if resume == "auto" and (folder / "config.yaml").exists():
        return _continue(folder, checked, key="hydra.run.dir"), True
    return claim_given(folder, key="hydra.run.dir"), False


def _place(node: DictConfig, *, key: str, is_typed: bool) -> Path:
    """Return the folder that a pattern comes to, where no value in it and no link below its first folders leads out of them."""
    pattern, folder = str(OmegaConf.to_container(node, resolve=False)["dir"]), str(node.dir)  # type: ignore[call-overload, index]
    problems = check_pattern(pattern, folder, key=key)
    fixed = os.path.dirname(pattern.partition("${")[0])
    if not problems and not is_typed and fixed:
        problems = check_below(Path(fixed).absolute(), Path(folder).absolute(), key=key)
    if problems:
        raise ConfigErrors(problems)
    return Path(folder).absolute()


def _continue(folder: Path, checked: RunConfig, *, key: str) -> Path:
    """Take the folder of a run, refusing to continue it under a configuration that would give other results than its own."""
    hold(folder, key=key)
    require_own(folder, key=key)
    changed = changes(checked, folder)
    if changed:
        raise ConfigError(
            key=key,
            happened=f"the run in {folder} has another configuration:\n    " + "\n    ".join(changed[:12]),
            expected="the configuration that it was started with",
            fix=f"`ddp-train resume {folder}` takes the saved one (and overrides after it); or start a new run in another folder",
        )
    RunDir(folder).forget_failure()
    return folder


def _resume(arguments: list[str], place: Place, *, is_restart: bool = False) -> int:
    """`ddp-train resume RUN [key=value ...]`: continue a run under its own frozen config, without composing anything again.

    Args:
        is_restart: nobody typed it: ranks that have just died are started again.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            happened="which run?",
            expected="ddp-train resume RUN [key=value ...]",
            fix="give a run folder, a checkpoint or the folder of a sweep",
        )
    path, overrides = Path(arguments[0]), arguments[1:]
    if is_sweep(path):
        return _resume_sweep(path.absolute(), overrides, place, is_restart=is_restart)
    folder = run_of(path)
    hold(
        sweep_of(folder) or folder, key="resume", within_s=_LET_GO_WITHIN_S if is_restart else 0.0
    )  # a sweep that runs may come to this job at any time
    job = frozen_job(folder, overrides, checkpoint=str(path.absolute()) if is_checkpoint(path) else None)
    _refuse_other_machines(job, path)
    refuse_without_effect(job, overrides)
    job.run_dir.forget_failure()
    record(job.run_dir, job.config)
    return place.begin(job)


def _resume_sweep(folder: Path, overrides: list[str], place: Place, *, is_restart: bool) -> int:
    """Run what a sweep has not finished. A sweeper that decides as it goes is asked again after that."""
    sweep = Sweep.load(folder)
    wrong = [text for text in overrides if not text.startswith(("sweep.", "cluster."))]
    if wrong:
        raise ConfigError(happened=f"{wrong[0]} would change what the jobs compute", expected="sweep.* or cluster.*, or a new sweep")
    hold(folder, key="resume", within_s=_LET_GO_WITHIN_S if is_restart else 0.0)
    require_own(folder, key="resume")
    if not sweep.is_planned:
        let_go()  # composing takes it again
        sys.argv[1:] = [*sweep.command, *overrides, f"hydra.sweep.dir={folder}"]
        return _compose(place)
    configs = [sweep.run_dir(job).root for job in sweep.jobs if sweep.run_dir(job).config.exists()]
    if not configs:
        raise ConfigError(key="resume", happened=f"{folder} has no job with its config.yaml", expected="the folder of a sweep")
    first = frozen_job(configs[0], overrides, asked=folder)
    _refuse_other_machines(first, folder)
    multirun = Multirun(sweep, first.config.tree["sweep"], place.begin_sweep, _check)
    try:
        multirun.take_up(lambda job_folder: frozen_job(job_folder, overrides, in_sweep=True), is_asked=not is_restart)
    finally:
        multirun.close()
    return multirun.exit_code()


def _refuse_other_machines(job: Job, path: Path) -> None:
    if job.config.tree["cluster"]["launcher"] == "torchrun" and not devices.is_torchrun_worker():
        raise ConfigError(
            key="cluster", happened="the run is over several machines", fix=f"torchrun ... -m ddp_train resume {path}, on each"
        )


def _show(arguments: list[str]) -> int:
    """`ddp-train runs SWEEP`: show the table of a sweep."""
    if len(arguments) != 1:
        raise ConfigError(happened="which sweep?", expected="ddp-train runs SWEEP", fix="give the folder of a sweep")
    sweep = Sweep.load(Path(arguments[0]).absolute())
    for job in sweep.jobs:  # the folders know more than sweep.json, when everything was killed
        if job.status != RUNNING or not is_held(sweep.root):
            sweep.settle(job, sweep.metric)
    show(sweep)
    return DONE


def _prepare(arguments: list[str]) -> int:
    """`ddp-train prepare tokens FILE... to=FOLDER`: make token shards of text."""
    from ddp_train.cli import prepare_tokens  # numpy, which no other command needs before its ranks do

    return prepare_tokens.main(arguments)


def _is_overridden(composed: DictConfig, key: str) -> bool:
    return any(text.lstrip("+").startswith(f"{key}=") for text in texts(composed.hydra.overrides.hydra))


@contextmanager
def _full_hydra_errors() -> Iterator[None]:
    """Have Hydra raise its errors instead of printing them: we show all problems at once."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _report(command: Callable[[], int], place: Place) -> int:
    """Turn every way in which a command ends into its exit code, and say what the user can mend."""
    try:
        check_overrides(sys.argv[1:])
        return command()
    except SystemExit as error:  # ours, a sweep's that ends here, or Hydra's own
        if not isinstance(error, _Exit) or error.error is None:
            return error.code if isinstance(error.code, int) else DONE
        return _say(error.error, place)
    except (ConfigError, ConfigErrors, HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        return _say(error, place)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        let_go()


def _say(error: Exception, place: Place) -> int:
    """Show what ended the command, and return the exit code: whether anything had begun decides both."""
    is_file_error = isinstance(error, OSError) and not isinstance(error, HydraException)  # Hydra's missing file is both
    if isinstance(error, ConfigError) or (is_file_error and not place.has_begun):
        error = ConfigErrors([error if isinstance(error, ConfigError) else ConfigError(happened=str(error))])
    if isinstance(error, ConfigErrors):
        print(error.text(has_begun=place.has_begun), file=sys.stderr)
        return WRONG_INPUT
    if not place.has_begun:
        print(hydra_errors.explain(error, sys.argv[1:], CONF), file=sys.stderr)
        return WRONG_INPUT
    if not is_file_error:
        traceback.print_exception(error)
    folders = ", ".join(RunDir(folder).shown() for folder in held())
    print(f"\n{folders} cannot go on: {error}\n`ddp-train resume {folders}` continues it when that is mended", file=sys.stderr)
    return FAILED
