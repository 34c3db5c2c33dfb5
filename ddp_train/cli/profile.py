"""`ddp-train profile`: let a run that goes on record some of its steps."""

import shlex
from pathlib import Path

from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.cli.status import may_go_on
from ddp_train.config.saved import saved_config
from ddp_train.errors import DONE, ConfigError
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import ProfileRequest, RunFolder
from ddp_train.run_folder.sweep import sweep_of
from ddp_train.system.folder_lock import is_locked

USAGE = """ddp-train profile RUN [--kind=trace|memory] [--steps=N] [--ranks=0,1]

  RUN            the folder of a run in progress: after its next training record it records some steps into RUN/profile
  --kind         trace: what runs when, and a table of what takes longest (the default); memory: what is allocated when
  --steps        number of steps; default: profile.steps of the run
  --ranks        ranks that record, each into its own files; default: profile.ranks of the run

`touch RUN/profile.request` does the same as the command without options.
"""


def profile(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train profile RUN [--kind=...] [--steps=...] [--ranks=...]`: request a record from a run. Does not wait for it."""
    options, (folder,) = parse_words(arguments, USAGE, {"--kind": "KIND", "--steps": "N", "--ranks": "RANKS"})
    run_folder = RunFolder(run_of(Path(folder), key="RUN"))
    _require_going_on(run_folder)
    try:
        request = ProfileRequest(
            kind=options.get("--kind"),
            steps=int(options["--steps"]) if "--steps" in options else None,
            ranks=[int(text) for text in options["--ranks"].strip("[]").split(",")] if "--ranks" in options else None,
        )
    except ValueError as error:
        raise ConfigError(happened=str(error), expected="the options of `ddp-train profile --help`", fix="") from None
    if not request.put(run_folder):
        happened = f"{run_folder.profile_request} exists: a profile was requested already, and starts after the next training record"
        raise ConfigError(happened=happened, fix=f"rm {shlex.quote(str(run_folder.profile_request))} cancels it")
    config = saved_config(run_folder.root)
    log_every_steps, defaults = config["trainer"]["log_every_steps"], config["profile"]
    steps, ranks = request.steps or defaults["steps"], ", ".join(map(str, request.ranks or defaults["ranks"]))
    when = f"after the next training record (one every {log_every_steps} steps)"
    print(f"requested: {steps} steps on rank {ranks}, {when}; into {run_folder.as_typed()}/profile")
    return DONE


def _require_going_on(run_folder: RunFolder) -> None:
    """Refuse a folder where no run trains or is about to."""
    shown, sweep = run_folder.as_typed(), sweep_of(run_folder.root)
    if run_folder.task.exists():
        raise ConfigError(happened=f"{shown} is an evaluation, which takes no steps", expected="the folder of a run that trains")
    if run_folder.is_completed():
        happened = f"{shown} is done: no step is left to record"
        raise ConfigError(happened=happened, expected="a run in progress", fix="ddp-train ... profile=trace records in a new run")
    if not may_go_on(run_folder) and not (sweep is not None and is_locked(sweep)):
        happened = f"no process is training in {shown}"
        raise ConfigError(happened=happened, expected="a run in progress", fix=f"ddp-train resume {shlex.quote(shown)} profile.kind=trace")
