"""`ddp-train doctor`: start the ranks of a run, which call the doctor's program instead of training."""

import sys
from dataclasses import replace

from ddp_train.cli.compose import compose_and_run
from ddp_train.config.command.command_line import options_first
from ddp_train.config.run_config import RunConfig
from ddp_train.doctor.machine import most_minutes
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, ConfigError
from ddp_train.launch.engine.engine import has_queue
from ddp_train.launch.job import Job, RankProgram
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.claim import clear
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import read_json

USAGE = """ddp-train doctor [--full] [--json] [key=value group=option ...]

  key=value      the overrides of the planned run: doctor examines the machines that it would use, its data and its folder.
                 By hand, type the same command on each machine, as for the run itself; with cluster=slurm a short job examines them
  --full         also measure how fast each rank computes and how fast an all-reduce of all ranks is; takes up to a minute more

doctor trains nothing and leaves no files. The exit code is 0 if the machines are fit, 78 if something is wrong with one of them.
"""

_FULL, _JSON = "--full", "--json"
_SEEN_WITHIN_S = 3.0  # a network file system may show the files of another machine late


def examine(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train doctor [--full] [key=value ...]`: examine the machines of a run."""
    words = [word for word in arguments if word not in (_FULL, _JSON)]
    if refused := [word for word in words if word in ("-m", "--multirun") or word.startswith("resume=")]:
        happened = f"doctor examines the machines of one planned run, not {refused[0]}"
        raise ConfigError(happened=happened, expected=USAGE.partition("\n")[0])
    program = RankProgram(function=f"ddp_train.doctor.checkup.{'full' if _FULL in arguments else 'quick'}")

    def examination_of(job: Job) -> Job:
        typed = [sys.argv[0], "doctor", *arguments]
        return replace(job, work=program, command=typed, config=_as_short_job(job.config, is_full=_FULL in arguments))

    words = options_first([*words, "resume=never"])  # a folder that was typed and holds a run is refused, not continued
    try:
        code = compose_and_run(words, runner, change=examination_of)
        if runner.begun_folder is None:  # Hydra has shown something (--cfg)
            return code
        report = RunFolder(runner.begun_folder).doctor
        is_there = wait_until(report.exists, within_s=_SEEN_WITHIN_S if code == DONE else 0.0, every_s=0.1)
        if is_there and _JSON in arguments:
            print(report.read_text())
        if code != DONE:
            return code
        return int(read_json(report)["exit_code"]) if is_there else ENVIRONMENT_REFUSES  # an engine's code does not have the doctor's
    finally:
        if runner.begun_folder is not None:
            clear(runner.begun_folder)


def _as_short_job(config: RunConfig, *, is_full: bool) -> RunConfig:
    """Return the config for an engine's queue: the examination waits for no other run, the command waits for it, and it is short."""
    if not has_queue(config.cluster.launcher):
        return config
    minutes = most_minutes(config.cluster.device, config.batch.world_size, is_full=is_full)
    return replace(config, after=None, cluster=replace(config.cluster, wait=True, walltime=60 * minutes, grace_s=10))
