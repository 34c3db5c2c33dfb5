"""`ddp-train`: which command was typed, and how it ends (`error_exit`: when it cannot go on).

Without a command it trains: Hydra composes (`compose`). The `JobRunner` gets every job that is composed, checked and claimed. That of the
typed command is `CommandRunner`; under torchrun rank 0 comes here with its own, for the ranks that are there (`rank.command_group`).
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_train import __version__
from ddp_train.cli.compose import compose_and_run
from ddp_train.config.cluster import ENGINES
from ddp_train.config.command.command_line import options_first, refuse_unsafe_overrides, with_conf
from ddp_train.config.command.commands import COMMANDS
from ddp_train.config.hydra_internals import limit_yaml
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import DONE, INTERRUPTED, EnvironmentRefuses, UserError
from ddp_train.launch import local
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import JobRunner, Slot
from ddp_train.run_folder.claim import give_up_claims
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
        _require_readable_names()
    except EnvironmentRefuses as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.path.insert(0, os.getcwd())  # components are importable from where the user stands, as with `python -m`
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
        from ddp_train.cli.error_exit import end_command  # which a command that goes well does without

        return end_command(error, runner)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        give_up_claims()


def _require_readable_names() -> None:
    """Refuse a current folder that is gone, and names that this process's encoding does not have. Raises EnvironmentRefuses."""
    try:
        os.getcwd().encode()
        " ".join(sys.argv).encode()
    except OSError as error:
        raise EnvironmentRefuses(happened=f"the current folder cannot be used: {error.strerror}", fix="cd FOLDER") from None
    except UnicodeEncodeError:
        happened = f"a name cannot be read with the file system encoding {sys.getfilesystemencoding()}"
        expected = "utf-8, in which checkpoints and configurations are written"
        raise EnvironmentRefuses(happened=happened, expected=expected, fix="export LC_ALL=C.UTF-8, and no PYTHONUTF8=0") from None
