"""The entry: Hydra composes here, in one process per job, and nowhere else. Imports no torch.

`run` gives every composed, checked and claimed job to a function: on the command line that one starts torchrun agents
(`launch`), under torchrun it hands the job to the group of ranks that is already there (`worker`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ddp_train import config, devices, diagnose, launch
from ddp_train.errors import ConfigError
from ddp_train.job import Job
from ddp_train.run_dir import RunDir, claim_given, claim_new, hold, let_go

RunJob = Callable[[Job], int]
"""Runs one job to its end and returns its exit code."""

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf") if path.is_dir())
"""The config groups: inside the installed package, or at the top of a checkout."""

DONE, WRONG_INPUT, INTERRUPTED = 0, 2, 130
STOPPED = (INTERRUPTED, 75, 143)  # by Ctrl-C; by another signal with everything saved, with nothing to save
"""Exit codes; docs/architecture.md has the whole table."""


def main() -> int:
    """Run the command line in the process that was typed, and return the exit code."""
    sys.path.insert(0, os.getcwd())  # components are importable from where the user stands, as with `python -m`
    return run(launch.run)


def run(run_job: RunJob) -> int:
    """Let Hydra compose what sys.argv asks for, and run each job that comes of it; or continue a run (`resume RUN`).

    Hydra's own interface stays as it is: --help, --cfg, --info, tab completion, -m with any sweeper.
    """
    if sys.argv[1:2] == ["resume"]:
        return _report(lambda: _resume(sys.argv[2:], run_job))
    exit_codes: list[int] = []  # Hydra has no use for them; a job that raises makes it print its own view of the matter

    def task(composed: DictConfig) -> None:
        try:
            job = _job(composed, HydraConfig.get())
        except (ConfigError, config.ConfigErrors) as error:  # of one job of a sweep; the others go on
            print(f"job {HydraConfig.get().job.num}: {error}", file=sys.stderr)
            exit_codes.append(WRONG_INPUT)
            return
        job.run_dir.record_config(job.config.yaml())
        exit_codes.append(run_job(job))
        if exit_codes[-1] in STOPPED:
            raise _Exit(exit_codes[-1])  # the sweep, too

    def compose() -> int:
        with _full_hydra_errors():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
        return next((code for code in exit_codes if code != DONE), DONE)

    return _report(compose)


class Checked(Callback):
    """Checks a config before Hydra makes its folder, and claims that folder (Hydra itself takes any that exists)."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check and claim for a single run."""
        with _exits_of_its_own():
            self._prepare(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the folder of a sweep; its jobs are checked one by one, because each composes another config."""
        with _exits_of_its_own():
            folder = Path(config.hydra.sweep.dir).absolute()
            folder = claim_given(folder, key="hydra.sweep.dir") if _is_overridden(config, "hydra.sweep.dir") else claim_new(folder)
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.sweep.dir = str(folder)
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")  # jobs compose again, from these overrides

    def _prepare(self, composed: DictConfig) -> None:
        checked = _check(composed, composed.hydra)
        if checked.tree["cluster"]["launcher"] == "torchrun" and not devices.is_torchrun_worker():
            raise _Exit(launch.join(checked, sys.argv[1:]))  # global rank 0 composes and claims, wherever it is
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
    resume, run_dir = Path(checked.tree["resume"]), RunDir(Path(hydra_config.runtime.output_dir))
    if hydra_config.mode == RunMode.MULTIRUN:
        if run_dir.config.exists():
            raise ConfigError(
                key="hydra.sweep.subdir", happened=f"two jobs of the sweep have the folder {run_dir.root}", expected="one each"
            )
        if checked.tree["cluster"]["launcher"] == "torchrun" and not devices.is_torchrun_worker():
            raise ConfigError(
                key="cluster", happened="a sweep over several machines", fix="torchrun ... -m ddp_train -m ... on each machine"
            )
    return Job(
        config=checked,
        run_dir=run_dir,
        command=list(sys.argv),
        overrides=list(hydra_config.overrides.task),
        checkpoint=str(resume.absolute()) if (resume / "manifest.json").exists() else None,
    )


def _check(composed: DictConfig, hydra_config: DictConfig) -> config.RunConfig:
    job_config = composed.copy()
    if "hydra" in job_config:
        HydraConfig.instance().set_config(composed)  # for ${hydra:...}, which Hydra itself resolves only later
        with read_write(job_config), open_dict(job_config):
            del job_config["hydra"]
    if hydra_config.job.chdir:
        raise ConfigError(
            key="hydra.job.chdir",
            happened="is true",
            expected="false: ranks stand where you stand, so that they find your modules and data",
        )
    return config.check(job_config, hydra=hydra_config)


def _claim(composed: DictConfig, checked: config.RunConfig) -> tuple[Path, bool]:
    """Return the run folder, ours alone, and whether a run in it is continued."""
    resume = checked.tree["resume"]
    if resume not in ("auto", "never"):
        return _continue(_run_of(Path(resume)), checked, key="resume"), True
    folder = Path(composed.hydra.run.dir).absolute()
    if not _is_overridden(composed, "hydra.run.dir"):
        return claim_new(folder), False
    if resume == "auto" and (folder / "config.yaml").exists():
        return _continue(folder, checked, key="hydra.run.dir"), True
    return claim_given(folder, key="hydra.run.dir"), False


def _continue(folder: Path, checked: config.RunConfig, *, key: str) -> Path:
    """Take the folder of a run, refusing to continue it under a configuration that would give other results than its own."""
    hold(folder, key=key)
    changed = config.differences(checked.tree, _saved_config(folder))
    if changed:
        raise ConfigError(
            key=key,
            happened=f"the run in {folder} has another configuration:\n    " + "\n    ".join(changed[:12]),
            expected="the configuration that it was started with",
            fix=f"`ddp-train resume {folder}` takes the saved one (and overrides after it); or start a new run in another folder",
        )
    RunDir(folder).forget_failure()
    return folder


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        saved = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except Exception as error:  # OSError, or what the YAML parser raises
        raise ConfigError(key="resume", happened=f"{folder}/config.yaml cannot be read: {error}") from None
    if not isinstance(saved, dict) or not saved:
        raise ConfigError(key="resume", happened=f"{folder}/config.yaml holds no configuration")
    return {str(name): value for name, value in saved.items()}


def _run_of(path: Path) -> Path:
    """Return the run folder of a run folder or of one of its checkpoints."""
    for folder in (path, path.parent.parent):
        if path.exists() and (folder / "config.yaml").exists():
            return folder.absolute()
    raise ConfigError(
        key="resume", happened=f"{path} is no run folder and no checkpoint", expected="auto, never, or a folder that holds config.yaml"
    )


def _resume(arguments: list[str], run_job: RunJob) -> int:
    """`ddp-train resume RUN [key=value ...]`: continue a run under its own frozen config, without composing anything again."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(happened="which run?", expected="ddp-train resume RUN [key=value ...]", fix="give a run folder or a checkpoint")
    path, overrides = Path(arguments[0]), arguments[1:]
    folder = _run_of(path)
    saved = _saved_config(folder)
    diagnose.refuse_unknown(overrides, saved)
    tree = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(saved), OmegaConf.from_dotlist(overrides)))
    assert isinstance(tree, dict)
    checked = config.load({str(name): value for name, value in tree.items()})
    if checked.tree["cluster"]["launcher"] == "torchrun" and not devices.is_torchrun_worker():
        raise ConfigError(
            key="cluster", happened="the run is over several machines", fix=f"torchrun ... -m ddp_train resume {path}, on each"
        )
    hold(folder, key="resume")
    run_dir, first = RunDir(folder), folder / ".hydra" / "overrides.yaml"
    run_dir.forget_failure()
    run_dir.record_config(checked.yaml())
    return run_job(
        Job(
            config=checked,
            run_dir=run_dir,
            command=list(sys.argv),
            overrides=[*(OmegaConf.load(first) if first.exists() else []), *overrides],
            checkpoint=str(path.absolute()) if (path / "manifest.json").exists() else None,
        )
    )


def _is_overridden(composed: DictConfig, key: str) -> bool:
    return any(str(text).lstrip("+").startswith(f"{key}=") for text in composed.hydra.overrides.hydra)


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


def _report(command: Callable[[], int]) -> int:
    """Turn every way in which a command ends into its exit code, and say what the user can mend."""
    try:
        return command()
    except _Exit as error:
        if error.error is None:
            return int(error.code or 0)
        _say(error.error)
    except (ConfigError, config.ConfigErrors, HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        _say(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        let_go()
    return WRONG_INPUT


def _say(error: Exception) -> None:
    if isinstance(error, OSError) and not isinstance(error, HydraException):  # Hydra's missing file is both
        error = ConfigError(happened=str(error))
    if isinstance(error, ConfigError):
        error = config.ConfigErrors([error])
    known = isinstance(error, config.ConfigErrors)
    print(error if known else diagnose.explain(error, sys.argv[1:], CONF), file=sys.stderr)
