"""`ddp-train resume`: continue a run under its frozen config, or run the unfinished jobs of a sweep."""

import shlex
import sys
from contextlib import closing
from pathlib import Path

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.cli.compose import check_composed, compose_and_run
from ddp_train.cli.location import lock_run
from ddp_train.cli.saved_run import TRUST, ask_trust, frozen_job, parse_words, refuse_without_effect, require_more, run_of
from ddp_train.config.cluster import engine_name_of
from ddp_train.config.saved import config_text
from ddp_train.errors import WRONG_INPUT, ConfigError
from ddp_train.launch import machines
from ddp_train.launch.job import Evaluation
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.claim import give_up_claims
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.sweep import Sweep
from ddp_train.sweep.hydra_jobs import Multirun
from ddp_train.system.folder_lock import lock
from ddp_train.system.process_env import is_torchrun_worker

USAGE = """ddp-train resume RUN [key=value ...] [~callbacks.X ...]

  RUN            the folder of a run: it continues from its newest good checkpoint, under its own configuration;
                 one of its checkpoints (RUN/checkpoints/step_00001000, RUN/checkpoints/best): it continues from there;
                 the folder of a sweep: its unfinished jobs are run
  key=value      single values to change, e.g. trainer.max_steps=2000; for a sweep only those of sweep and cluster
  ~callbacks.X   a callback to remove; also a metric writer: ~metrics.X
  --trust        allow code that another user has written to run as you; without it, the code is only shown
"""

_UNLOCKED_WITHIN_S = 120.0  # after a rank has died: at once on one machine, with the lease of a network file system on another


def resume_typed(arguments: list[str], runner: JobRunner, *, is_restart: bool = False) -> int:
    """`ddp-train resume RUN [key=value ...]`: continue a run under its own frozen config. `is_restart`: of ranks that have just died."""
    _, (run, *overrides) = parse_words(arguments, USAGE, {TRUST: ""}, most=None)
    path = Path(run)
    folder = path if is_sweep(path) else run_of(path)
    ask_trust("resume", [TRUST] if is_restart else arguments, folder)
    if is_sweep(path):
        return _resume_sweep(path.absolute(), overrides, runner, is_restart=is_restart)
    checkpoint = str(path.absolute()) if is_checkpoint(path) else None
    if not is_torchrun_worker():
        config = frozen_job(folder, overrides, checkpoint=checkpoint).config
        if (code := runner.meet_machines(config, run=checkpoint or str(folder.absolute()))) is not None:
            return code
    lock_run(folder, key="resume", within_s=_UNLOCKED_WITHIN_S if is_restart else 0.0)
    job = frozen_job(folder, overrides, checkpoint=checkpoint)
    if isinstance(job.work, Evaluation) and job.run_folder.is_completed():
        fix = f"ddp-train {'predict' if job.work.predicts else 'evaluate'} {shlex.quote(job.work.checkpoint)}"
        raise ConfigError(key="resume", happened=f"{job.run_folder.as_typed()} is an evaluation, and it is done", fix=fix)
    refuse_without_effect(job, overrides)
    if engine_name_of(job.config.cluster) is not None:
        require_more(job)
    saved = job.run_folder.config.read_text()
    job.run_folder.record_config(config_text(job.config, job.run_folder.root))
    code = runner.run_to_end(job, is_restart=is_restart)
    if code == WRONG_INPUT:  # the ranks have refused the overrides, and trained nothing: the run keeps its config
        job.run_folder.record_config(saved)
    return code


def _resume_sweep(folder: Path, overrides: list[str], runner: JobRunner, *, is_restart: bool) -> int:
    """Run the unfinished jobs of a sweep. A sweeper like Optuna goes on choosing jobs after that."""
    sweep = Sweep.load(folder)
    wrong = [text for text in overrides if not text.startswith(("sweep.", "cluster."))]
    if wrong:
        raise ConfigError(happened=f"{wrong[0]} would change what the jobs compute", expected="sweep.* or cluster.*, or a new sweep")
    configs = [sweep.run_folder(job).root for job in sweep.jobs if sweep.run_folder(job).config.exists()]
    if configs and not is_torchrun_worker():
        cluster = frozen_job(configs[0], overrides).config.cluster
        if (code := machines.take_part_in_sweep(cluster, sys.argv[1:])) is not None:
            return code
    lock(folder, key="resume", within_s=_UNLOCKED_WITHIN_S if is_restart else 0.0)
    if not sweep.is_planned:
        give_up_claims()  # `compose` locks it again
        return compose_and_run([*sweep.command, *overrides, f"hydra.sweep.dir={folder}"], runner)
    if not configs:
        raise ConfigError(key="resume", happened=f"{folder} has no job with a config.yaml", expected="the folder of a sweep")
    first = frozen_job(configs[0], overrides)
    with closing(Multirun(sweep, first.config.sweep, runner, check_composed)) as multirun:
        multirun.resume(lambda job_folder: frozen_job(job_folder, overrides, in_sweep=True), is_asked=not is_restart)
    return multirun.exit_code()
