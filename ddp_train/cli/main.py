"""`ddp-train`: which command was typed, and how it ends: with an exit code, and after an error with a message.

Without a command it trains: Hydra composes (`compose`). The `JobRunner` gets every job that is composed, checked and claimed. That of the
typed command is `CommandRunner`; under torchrun rank 0 comes here with its own, for the ranks that are there (`rank.command_group`).
"""

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_train import CONF, __version__
from ddp_train.cli.compose import compose_and_run
from ddp_train.config.cluster import ENGINES
from ddp_train.config.command.command_line import options_first, refuse_unsafe_overrides, with_conf
from ddp_train.config.command.commands import COMMANDS
from ddp_train.config.hydra_internals import limit_yaml
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import DISK_REFUSES, DONE, FAILED, INTERRUPTED, WRONG_INPUT, ConfigError, ConfigErrors, EnvironmentRefuses, UserError
from ddp_train.launch import local
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import JobRunner, Slot
from ddp_train.run_folder.claim import give_up_claims
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.system import process_env
from ddp_train.system.process import die_with_parent

if TYPE_CHECKING:
    from ddp_train.launch.node.this_node import NodeRendezvous


class CommandRunner(JobRunner):
    """Runs the jobs of the command that was typed: torchrun agents start their ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._led: NodeRendezvous | None = None  # where machines meet that this one, the first, leads
        pid, _, descriptor = os.environ.pop(process_env.CALLER, "").partition(":")  # what this command starts has another one
        self._caller = int(descriptor) if descriptor else None  # a file of the process that has started this command by `ddp_train.run`
        if self._caller is not None:
            os.set_inheritable(self._caller, False)
            die_with_parent(int(pid), number=signal.SIGTERM)  # its end is a stop, which lets the run save

    def meet_machines(self, config: RunConfig, *, run: str) -> int | None:
        if config.cluster.launcher == "machines":
            from ddp_train.launch import machines  # with what each of several machines runs, which takes its time to import

            self._led = machines.meet_machines(config.cluster, run=run)
            if self._led is not None and not self._led.is_first:
                return machines.follow(self._led, config)
        return None

    def launch_job(self, job: Job) -> int:
        """Run a job on this machine and on those that it leads, or give it to the engine that its section `cluster` names."""
        self._tell_caller("folder", str(job.run_folder.root))
        if self._led is not None:
            from ddp_train.launch import machines

            return machines.lead(self._led, job)
        if job.config.cluster.launcher not in ENGINES:
            return local.run_on_this_machine(job)
        from ddp_train.launch import submit  # and with it what starts other machines, which takes its time to import

        return submit.submit_job(job)

    def slots(self, folder: Path, count: int) -> Sequence[Slot]:
        return [local.LocalSlot(number, count) for number in range(count)]

    def show_error(self, text: str) -> None:
        if self._caller is None:
            super().show_error(text)
        self._tell_caller("error", text)  # the caller raises it

    def _tell_caller(self, kind: Literal["folder", "error"], text: str) -> None:
        """Write a line of JSON for the program that has started this command by `ddp_train.run`, if one has."""
        if self._caller is not None:
            os.write(self._caller, json.dumps({kind: text}).encode() + b"\n")


def main() -> int:
    """Run the command line in the process that was typed, and return the exit code."""
    runner = CommandRunner()
    try:
        sys.path.insert(0, os.getcwd())  # components are importable from where the user stands, as with `python -m`
    except FileNotFoundError:
        print("the current folder was removed", file=sys.stderr)
        return EnvironmentRefuses.exit_code
    return run(sys.argv[1:], runner)


def run(words: Sequence[str], runner: JobRunner) -> int:
    """Run what a command line asks for, and return the exit code.

    Hydra's own interface stays as it is: --help, --cfg, --info, tab completion, -m with any sweeper.
    """
    if "--version" in words:
        print(f"ddp_train {__version__}")
        return DONE
    if not words or words[0] not in COMMANDS:
        return _exit_code_of(lambda: compose_and_run(options_first(with_conf(words)), runner), words, runner)
    command = COMMANDS[words[0]]
    arguments = [*words[1:]]
    module = importlib.import_module(f"{__package__}.{command.module}")  # alone: all together take longer than a run is composed
    if {"--help", "-h"} & set(arguments):
        usage: str = getattr(module, command.usage)
        if arguments[0] in command.words:  # its own part alone
            usage = usage[usage.index(f"ddp-train {words[0]} {arguments[0]} ") :].partition("\nddp-train ")[0]
        print(usage)
        return DONE
    function = getattr(module, command.function)
    return _exit_code_of(lambda: function(with_conf(arguments) if command.reads_yaml else arguments, runner), words, runner)


def resume(folder: Path, runner: JobRunner) -> int:
    """Continue the run or the sweep that an earlier attempt of this group of ranks has left (under torchrun)."""
    from ddp_train.cli.resume import resume_typed

    return _exit_code_of(lambda: resume_typed([str(folder)], runner, is_restart=True), [], runner)


def _exit_code_of(command: Callable[[], int], words: Sequence[str], runner: JobRunner) -> int:
    """Turn every way in which a command ends into its exit code."""
    try:
        limit_yaml()
        refuse_unsafe_overrides(words)
        return command()
    except SystemExit as error:  # Hydra's own, which nothing of ours raises
        return error.code if isinstance(error.code, int) else DONE
    except (UserError, HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        return _end_command(error, runner)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        give_up_claims()


def _end_command(error: Exception, runner: JobRunner) -> int:
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
    from ddp_train.config.command import hydra_errors  # which a command that goes well does without

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
    if not isinstance(error, OSError) or not error.strerror or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"
