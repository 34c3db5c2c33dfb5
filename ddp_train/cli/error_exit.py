"""Prints the error that ends a command, and chooses its exit code: a mistake that a person can mend, or a failure."""

import errno
import resource
import sys
import traceback
from pathlib import Path

from hydra.errors import HydraException

from ddp_train import CONF
from ddp_train.config.command import hydra_errors
from ddp_train.errors import DISK_REFUSES, FAILED, WRONG_INPUT, ConfigError, ConfigErrors, EnvironmentRefuses, UserError
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import RunFolder, is_sweep


def end_command(error: Exception, runner: JobRunner) -> int:
    """Print the error that ends a command, and return its exit code."""
    if (mistake := _mistake(error, has_begun=runner.begun_folder is not None)) is None:
        return _show_failure(error, runner.begun_folder)
    text, code = mistake
    runner.show_error(text)
    return code


def _mistake(error: Exception, *, has_begun: bool) -> tuple[str, int] | None:
    """Return the message for an error that a person can mend, and the exit code; None: it is a failure."""
    if isinstance(error, ConfigError) and error.key:
        error = ConfigErrors([error])
    if isinstance(error, ConfigErrors):
        return error.text(has_begun=has_begun), WRONG_INPUT
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if has_begun:
        return None
    if not _is_of_the_disk(error) and hydra_errors.is_of_composing(error):  # Hydra writes `.hydra`, too
        return hydra_errors.explain_hydra_error(error, sys.argv[1:], CONF), WRONG_INPUT  # as Hydra has read them
    if _is_file_error(error):
        return f"{_in_words(error)}; nothing was started", EnvironmentRefuses.exit_code if _is_of_the_disk(error) else WRONG_INPUT
    return None


def _show_failure(error: Exception, folder: Path | None) -> int:
    """Show a failure, and how the run or the sweep in a folder goes on after it, if one had begun; return the exit code."""
    if not _is_file_error(error):
        traceback.print_exception(error)
    if folder is not None and (RunFolder(folder).config.exists() or is_sweep(folder)):
        run = RunFolder(folder)
        again = f"`{run.resume_command()}` continues it once that is fixed"
        print(f"\n{run.as_typed()} cannot continue: {_in_words(error)}\n{again}", file=sys.stderr)
    elif _is_file_error(error):
        print(_in_words(error), file=sys.stderr)
    return EnvironmentRefuses.exit_code if _is_of_the_disk(error) else FAILED


def _is_file_error(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(error, HydraException)  # Hydra's missing file is both


def _is_of_the_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in DISK_REFUSES


def _in_words(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] if error.errno == errno.EFBIG else resource.RLIM_INFINITY
    if limit == resource.RLIM_INFINITY:
        return named
    return f"{named}: `ulimit -f` limits a file to {limit:,} bytes; raise it, as with `ulimit -f unlimited`"
