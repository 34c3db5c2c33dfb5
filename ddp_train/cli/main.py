"""`ddp-train`: which command was typed, how it ends, and what is said when it cannot go on.

Without a command it trains: Hydra composes (`compose`). The `Launcher` gets every job that is composed, checked and claimed. The one of the
typed command starts torchrun agents (`launch`); under torchrun rank 0 comes here with its own, for the ranks that are there (`rank.main`).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_train import __version__
from ddp_train.cli.compose import Exit, compose
from ddp_train.config.check import CONF, ConfigErrors
from ddp_train.config.command import hydra_errors
from ddp_train.config.command.command_line import check_overrides, options_first, with_conf
from ddp_train.config.hydra_internals import limit_yaml
from ddp_train.errors import (
    DISK_REFUSES,
    DONE,
    ENVIRONMENT_REFUSES,
    FAILED,
    INTERRUPTED,
    WRONG_INPUT,
    ConfigError,
    EnvironmentRefuses,
    UserError,
)
from ddp_train.launch import local
from ddp_train.launch.job import Job
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.claim import release
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import is_sweep
from ddp_train.sweep.warm_group import slots
from ddp_train.system import handover
from ddp_train.system.process import die_with_parent

_caller: list[int] = []  # the descriptor of the file that `from_python.run` reads, if that has started this command


def main() -> int:
    """Run the command line in the process that was typed, and return the exit code."""
    _find_caller()
    try:
        (directory := os.getcwd()).encode()
        " ".join(sys.argv).encode()
    except OSError as error:
        print(f"the current folder cannot be used: {error.strerror}\n  fix: cd FOLDER", file=sys.stderr)
        return ENVIRONMENT_REFUSES
    except UnicodeEncodeError:
        happened = f"a name cannot be read with the file system encoding {sys.getfilesystemencoding()}"
        fix = "export LC_ALL=C.UTF-8, and no PYTHONUTF8=0"
        expected = "utf-8, in which checkpoints and configurations are written"
        print(EnvironmentRefuses(happened=happened, expected=expected, fix=fix), file=sys.stderr)
        return ENVIRONMENT_REFUSES
    sys.path.insert(0, directory)  # components are importable from where the user stands, as with `python -m`
    return run(Launcher(run=_begin, slots=slots))


def _begin(job: Job) -> int:
    """Run a job where its section `cluster` says, or give it to the engine that this names."""
    _tell_caller(folder=str(job.run_folder.root))
    launcher = job.config.cluster.launcher
    if launcher == "local":
        return local.run(job)
    from ddp_train.launch import machines, submit  # and with them what starts other machines, which takes its time to import

    return machines.run(job) if launcher == "machines" else submit.run(job)


def run(launcher: Launcher) -> int:
    """Run what sys.argv asks for.

    Hydra's own interface stays as it is: --help, --cfg, --info, tab completion, -m with any sweeper.
    """
    words = sys.argv[1:]
    if "--version" in words:
        print(f"ddp_train {__version__}")
        return DONE
    if not words or words[0] not in _COMMANDS:
        return _report(lambda: _train(words, launcher), launcher)
    name, *arguments = words
    module, function, usage = _COMMANDS[name]
    imported = importlib.import_module(f"{__package__}.{module}")  # alone: all together take longer than a run is composed
    if {"--help", "-h"} & set(arguments):
        print(getattr(imported, usage))
        return DONE
    return _report(lambda: getattr(imported, function)(with_conf(arguments) if name in _COMPOSING else arguments, launcher), launcher)


def resume(folder: Path, launcher: Launcher) -> int:
    """Continue the run or the sweep that an earlier attempt of this group of ranks has left (under torchrun)."""
    from ddp_train.cli.resume import resume_typed

    return _report(lambda: resume_typed([str(folder)], launcher, is_restart=True), launcher)


def _train(words: list[str], launcher: Launcher) -> int:
    """`ddp-train key=value ...`: train."""
    sys.argv[1:] = options_first(with_conf(words))
    return compose(launcher)


_COMMANDS = {
    "plan": ("plan", "plan", "USAGE"),
    "resume": ("resume", "resume_typed", "USAGE"),
    "evaluate": ("evaluate", "evaluate", "USAGE"),
    "predict": ("evaluate", "predict", "PREDICT_USAGE"),
    "export": ("export", "export", "USAGE"),
    "runs": ("status", "show_sweep", "RUNS_USAGE"),
    "status": ("status", "show_status", "USAGE"),
    "logs": ("status", "show_logs", "LOGS_USAGE"),
    "profile": ("profile", "profile", "USAGE"),
    "cancel": ("cancel", "cancel", "USAGE"),
    "verdict": ("status", "show_verdict", "VERDICT_USAGE"),
    "doctor": ("doctor", "examine", "USAGE"),
    "help": ("help", "explain", "USAGE"),
    "node": ("node", "node", "USAGE"),
    "prepare": ("prepare", "prepare", "USAGE"),
    "init": ("init", "init", "USAGE"),
}
"""The first word -> the module that does it, its function, and what --help shows of it. `config.command_line` has the same names."""

_COMPOSING = ("plan", "doctor", "help")
"""Those that read the same YAML as a run that is typed."""


def _report(command: Callable[[], int], launcher: Launcher) -> int:
    """Turn every way in which a command ends into its exit code, and say what the user can mend."""
    try:
        limit_yaml()
        check_overrides(sys.argv[1:])
        return command()
    except SystemExit as error:  # ours, a sweep's that ends here, or Hydra's own
        if not isinstance(error, Exit) or error.error is None:
            return error.code if isinstance(error.code, int) else DONE
        return _say(error.error, launcher)
    except (UserError, ConfigErrors, HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        return _say(error, launcher)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        release()


def _say(error: Exception, launcher: Launcher) -> int:
    """Show what ended the command, and return the exit code: whether anything had begun decides both."""
    is_file_error = isinstance(error, OSError) and not isinstance(error, HydraException)  # Hydra's missing file is both
    is_of_the_disk = isinstance(error, OSError) and error.errno in DISK_REFUSES
    has_begun = launcher.begun is not None
    if isinstance(error, ConfigError) and error.key:
        error = ConfigErrors([error])
    if isinstance(error, ConfigErrors):
        _show(error.text(has_begun=has_begun))
        return WRONG_INPUT
    if isinstance(error, UserError):
        _show(str(error))
        return error.exit_code
    if not has_begun and not is_of_the_disk and hydra_errors.is_of_composing(error):  # Hydra writes `.hydra`, too
        _show(hydra_errors.explain_hydra_error(error, sys.argv[1:], CONF))
        return WRONG_INPUT
    if not has_begun and is_file_error:
        _show(f"{_in_words(error)}; nothing was started")
        return ENVIRONMENT_REFUSES if is_of_the_disk else WRONG_INPUT
    if not is_file_error:
        traceback.print_exception(error)
    folder = launcher.begun
    if folder is not None and (RunFolder(folder).config.exists() or is_sweep(folder)):
        shown = RunFolder(folder).shown()
        print(f"\n{shown} cannot go on: {_in_words(error)}\n`ddp-train resume {shown}` continues it when that is mended", file=sys.stderr)
    elif is_file_error:
        print(_in_words(error), file=sys.stderr)
    return ENVIRONMENT_REFUSES if is_of_the_disk else FAILED


def _in_words(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] if error.errno == errno.EFBIG else resource.RLIM_INFINITY
    limited = f": `ulimit -f` allows a file {limit:,} bytes; raise it, as with `ulimit -f unlimited`"
    return named + limited * (limit != resource.RLIM_INFINITY)


def _show(text: str) -> None:
    """Show what ended the command; a program that has started it by `ddp_train.run` raises it."""
    if not _tell_caller(error=text):
        print(text, file=sys.stderr)


def _find_caller() -> None:
    """Look for the process that has started this command by `from_python.run`: its end is a stop."""
    pid, _, descriptor = os.environ.pop(handover.CALLER, "").partition(":")  # what this command starts has another one
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        _caller.append(int(descriptor))
        die_with_parent(int(pid), number=signal.SIGTERM)  # which lets it save


def _tell_caller(**facts: Any) -> bool:
    """Tell the caller something: `folder`, the run's; `error`, the text of what ended the command. False: there is none."""
    for descriptor in _caller:
        os.write(descriptor, json.dumps(facts).encode() + b"\n")
    return bool(_caller)
