"""The entry: Hydra composes here, in one process per job, and nowhere else. Imports no torch.

`run` gives every composed, checked and claimed job to a function: on the command line that one starts torchrun agents
(`launch`), under torchrun it hands the job to the group of ranks that is already there (`group`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from ddp_train import __version__
from ddp_train.cli import runs
from ddp_train.cli.compose import Exit, compose
from ddp_train.cli.resume import resume_typed
from ddp_train.config import hydra_errors, limits
from ddp_train.config.check import CONF, ConfigErrors, check_overrides
from ddp_train.errors import DONE, FAILED, INTERRUPTED, WRONG_INPUT, ConfigError
from ddp_train.launch import local
from ddp_train.launch.launcher import Launcher
from ddp_train.run_folder.claim import release
from ddp_train.run_folder.paths import RunFolder
from ddp_train.sweep.warm_group import slots
from ddp_train.system.folder_lock import held

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


def main() -> int:
    """Run the command line in the process that was typed, and return the exit code."""
    sys.path.insert(0, os.getcwd())  # components are importable from where the user stands, as with `python -m`
    return run(Launcher(run=local.run, slots=slots))


def run(launcher: Launcher) -> int:
    """Run what sys.argv asks for.

    Hydra's own interface stays as it is: --help, --cfg, --info, tab completion, -m with any sweeper.
    """
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if "--version" in sys.argv[1:]:
        print(f"ddp_train {__version__}")
        return DONE
    if command == ["prepare"]:
        return _report(lambda: _prepare(arguments), launcher)
    if command and command[0] in _USAGE and {"--help", "-h"} & set(arguments):
        print(_USAGE[command[0]])
        return DONE
    limits.install()
    if command == ["resume"]:
        return _report(lambda: resume_typed(arguments, launcher), launcher)
    if command == ["runs"]:
        return _report(lambda: runs.show_sweep(arguments), launcher)
    sys.argv[1:] = hydra_errors.options_first(sys.argv[1:])
    return _report(lambda: compose(launcher), launcher)


def resume(folder: Path, launcher: Launcher) -> int:
    """Continue the run or the sweep that an earlier attempt of this group of ranks has left (under torchrun)."""
    return _report(lambda: resume_typed([str(folder)], launcher, is_restart=True), launcher)


def _prepare(arguments: list[str]) -> int:
    """`ddp-train prepare tokens FILE... to=FOLDER`: make token shards of text."""
    from ddp_train.cli import prepare_tokens  # numpy, which no other command needs before its ranks do

    return prepare_tokens.main(arguments)


def _report(command: Callable[[], int], launcher: Launcher) -> int:
    """Turn every way in which a command ends into its exit code, and say what the user can mend."""
    try:
        check_overrides(sys.argv[1:])
        return command()
    except SystemExit as error:  # ours, a sweep's that ends here, or Hydra's own
        if not isinstance(error, Exit) or error.error is None:
            return error.code if isinstance(error.code, int) else DONE
        return _say(error.error, launcher)
    except (ConfigError, ConfigErrors, HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        return _say(error, launcher)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        release()


def _say(error: Exception, launcher: Launcher) -> int:
    """Show what ended the command, and return the exit code: whether anything had begun decides both."""
    is_file_error = isinstance(error, OSError) and not isinstance(error, HydraException)  # Hydra's missing file is both
    if isinstance(error, ConfigError) or (is_file_error and not launcher.has_begun):
        error = ConfigErrors([error if isinstance(error, ConfigError) else ConfigError(happened=str(error))])
    if isinstance(error, ConfigErrors):
        print(error.text(has_begun=launcher.has_begun), file=sys.stderr)
        return WRONG_INPUT
    if not launcher.has_begun:
        print(hydra_errors.explain_hydra_error(error, sys.argv[1:], CONF), file=sys.stderr)
        return WRONG_INPUT
    if not is_file_error:
        traceback.print_exception(error)
    folders = ", ".join(RunFolder(folder).shown() for folder in held())
    print(f"\n{folders} cannot go on: {error}\n`ddp-train resume {folders}` continues it when that is mended", file=sys.stderr)
    return FAILED
