"""A sweep, from Hydra's side: its jobs are composed, checked and frozen before they start; their results go back to the sweeper.

`cli` makes one `Multirun` per sweep. Hydra's sweeper calls `launch` through the plugin in `hydra_plugins`: once (Hydra's own sweeper), or
again and again (Optuna). Results of an earlier attempt in the same folder are read from sweep.json.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from ddp_train.config import check as config_check
from ddp_train.config.cluster import engine_name_of
from ddp_train.config.hydra_internals import BASIC_SWEEPER
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import SweepConfig
from ddp_train.config.tree import identity, texts
from ddp_train.errors import DISK_REFUSES, ENVIRONMENT_REFUSES, FAILED, ConfigError, ConfigErrors, EnvironmentRefuses, UserError
from ddp_train.launch import source_copy
from ddp_train.launch.job import Job, stops_at
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.submit import slots as engine_slots
from ddp_train.launch.submit import submit_jobs
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import GOALS, Sweep, SweepJob
from ddp_train.run_folder.trust import check_below
from ddp_train.sweep import schedule
from ddp_train.sweep.sweeper import compose_job, plans_all, save_as_hydra, swept_keys, use_copied_yaml
from ddp_train.sweep.table import EngineAnswers, SweepScreen, show, update

Check = Callable[[DictConfig, DictConfig], RunConfig]


class Multirun:
    """One sweep, new or read back from the folder of one that stopped; `runner` has the slots for its jobs."""

    def __init__(self, sweep: Sweep, settings: SweepConfig, runner: JobRunner, check: Check) -> None:
        self.sweep, self._settings, self._runner, self._check = sweep, settings, runner, check
        if settings.direction is not None:
            sweep.goal = GOALS[settings.direction]
        self._earlier: list[SweepJob] = []  # of an earlier attempt, completed or failed; each replaces one launch of the same identity
        self._contexts: dict[int, tuple[HydraContext, DictConfig]] = {}
        self._screen = SweepScreen(sweep)
        self._schedule: schedule.SweepScheduler | None = None
        self._engines = EngineAnswers()
        self._has_engine = False
        self._plans_all = sweep.is_planned
        self.end_code: int | None = None  # of a sweep that ends before its last job; None: it goes on

    def launch(self, context: HydraContext, base: DictConfig, job_overrides: Sequence[list[str]]) -> list[JobReturn]:
        """Compose, check and freeze jobs, run those that have not been run, and return the result of each.

        Raises ConfigErrors: with every problem of every job; none has been started.
        """
        self.sweep.keys = self.sweep.keys or swept_keys(base)
        loader: Any = context.config_loader
        if not plans_all(base) and not self._contexts:  # the first launch
            use_copied_yaml(loader, base, self.sweep.root / "conf")
        composed, checked = self.compose(loader, base, job_overrides)
        self.sweep.save()  # from here on the sweep can be resumed
        entries: list[SweepJob] = []
        to_run: list[tuple[SweepJob, Job]] = []
        for overrides, job_config, checked_config in zip(job_overrides, composed, checked, strict=True):
            entry = self._recall(identity(checked_config.tree, swept=self._swept()))
            if entry is None:
                if job_config.hydra.job.num != self._next_number():  # an earlier result has replaced a job before it
                    job_config = compose_job(loader, base, overrides, self._next_number())
                    checked_config = self._check(job_config, job_config.hydra)  # the number may be in the config
                entry, job = self._freeze(job_config, checked_config)
                to_run.append((entry, job))
            entries.append(entry)
            self._contexts[entry.number] = (context, job_config)
        self.sweep.is_planned = self._plans_all
        self.sweep.save()
        self.run(to_run)
        return [self._job_return(entry) for entry in entries]

    def compose(self, loader: Any, base: DictConfig, job_overrides: Sequence[list[str]]) -> tuple[list[DictConfig], list[RunConfig]]:
        """Compose and check jobs. Writes nothing. Raises ConfigErrors: with every problem of every job."""
        self._plans_all = plans_all(base)
        composed = [compose_job(loader, base, overrides, number) for number, overrides in enumerate(job_overrides, self._next_number())]
        return composed, self._check_all(composed)

    def resume(self, to_job: Callable[[Path], Job], *, is_asked: bool) -> None:
        """Run the unfinished jobs of an earlier attempt, from the frozen configs.

        Args:
            to_job: makes a job of a run folder.
            is_asked: by a person, who may have fixed the cause of failures: failed jobs are tried again. Not those of a sweeper that knows
                of the failure and has gone on.

        Raises ConfigErrors: there are not enough GPUs for so many jobs at a time.
        """
        retries_failed = is_asked and self.sweep.is_planned
        # Where the whole group was killed, a rank may have recorded a failure that is only the end of the other ranks.
        unjudged = set() if is_asked else {entry.number for entry in self.sweep.jobs if entry.status != Status.FAILED}
        jobs: list[tuple[SweepJob, Job]] = []
        self._engines = update(self.sweep, self._settings.metric)
        if self._engines.problems:
            happened = f"the engine does not report which jobs run: {self._engines.problems[0]}"
            raise EnvironmentRefuses(happened=happened, expected="an answer, so that no job runs twice", fix="try again in a minute")
        for entry in self.sweep.jobs:
            is_failed = entry.status == Status.FAILED and not retries_failed and entry.number not in unjudged
            if entry.status == Status.COMPLETED or is_failed:
                continue
            entry.failures = 0 if retries_failed else entry.failures
            try:
                jobs.append((entry, to_job(self.sweep.run_folder(entry).root)))
            except ConfigError as error:  # its folder is gone, say; the others go on
                entry.status = Status.FAILED
                self._screen.say(f"job {entry.number} cannot be run: {error}")
        if problems := schedule.problems([job.config for _, job in jobs], self._settings, plans_all=self._plans_all):
            raise ConfigErrors(problems)
        if is_asked:
            for entry, job in jobs:
                if entry.number not in self._engines.alive:
                    job.run_folder.reopen()
        self.run(jobs)
        self._earlier = list(self.sweep.jobs)

    def run(self, jobs: Sequence[tuple[SweepJob, Job]]) -> None:
        """Run frozen jobs, and set `end_code` when the sweep is to end here."""
        if not jobs:
            return
        self._has_engine = engine_name_of(jobs[0][1].config.cluster) is not None
        if schedule.is_left_to_a_queue(jobs[0][1].config, plans_all=self._plans_all):
            self._submit([(entry, job) for entry, job in jobs if entry.number not in self._engines.alive])
            return
        if self._schedule is None:
            folder, count = self.sweep.root, self._settings.parallel_jobs
            slots = engine_slots(folder, count) if self._has_engine else self._runner.slots(folder, count)
            self._runner.note_begun(folder)
            self._schedule = schedule.SweepScheduler(
                self.sweep,
                slots,
                self._settings,
                screen=self._screen,
                on_start=self._on_start,
                on_end=self._on_end,
                stops_at=partial(_stops_at, jobs[0][1]),
            )
        try:
            with self._screen:
                self._schedule.run(jobs)
        except OSError as error:  # a full disk, say
            again = f"`{RunFolder(self.sweep.root).resume_command()}` continues it after the fix"
            self._screen.say(f"\nthe sweep cannot continue: {error}\n{again}")
            self.end_code = ENVIRONMENT_REFUSES if error.errno in DISK_REFUSES else FAILED
            return
        if self._schedule.is_stopped:
            self.end_code = self._schedule.stop_code or FAILED

    def close(self) -> None:
        """End the processes and show the table."""
        if self._schedule is not None:
            self._schedule.close()
        if self.sweep.jobs:
            if self._has_engine:
                self._engines = update(self.sweep, self._settings.metric)
            with suppress(OSError):  # `run` has reported it
                self.sweep.save()
            show(self.sweep, self._engines.alive)
        name = self._settings.metric
        without_metric = (job for job in self.sweep.jobs if job.status == Status.COMPLETED and job.metric is None)
        if name and (job := next(without_metric, None)) is not None:
            result = self.sweep.run_folder(job).read_result()
            names = ", ".join(result.last) if result is not None else "none"
            self._screen.say(f"sweep.metric: job {job.number} has no metric {name!r}; it has {names}")

    def exit_code(self) -> int:
        return int(any(job.status == Status.FAILED for job in self.sweep.jobs)) if self.end_code is None else self.end_code

    def _submit(self, jobs: Sequence[tuple[SweepJob, Job]]) -> None:
        """Submit jobs to the queue of an engine; the sweep ends here where it refuses them."""
        if not jobs:
            return
        for entry, _ in jobs:
            entry.status, entry.attempts = Status.QUEUED, entry.attempts + 1
        self.sweep.save()
        folder = RunFolder(self.sweep.root)
        parallel = min(self._settings.parallel_jobs, len(jobs))
        try:
            code = source_copy.copy_source_for_several(folder.launch, limit_mib=jobs[0][1].config.cluster.code_limit_mib)
            id = submit_jobs([job for _, job in jobs], code, parallel=parallel)
        except UserError as error:
            missing = sum(entry.number not in update(self.sweep, self._settings.metric).alive for entry, _ in jobs)
            resume = folder.resume_command()
            print(f"\n{error}\n{missing} of {len(jobs)} jobs were not submitted; `{resume}` submits them after the fix,", file=sys.stderr)
            print(f"  and `{resume} cluster.wait=true` submits them one by one, as the queue has room", file=sys.stderr)
            self.end_code = error.exit_code
            return
        print(f"submitted as job {id}: {len(jobs)} jobs of {folder.as_typed()}, {parallel} at a time", flush=True)

    def _next_number(self) -> int:
        return max((job.number for job in self.sweep.jobs), default=-1) + 1

    def _check_all(self, composed: Sequence[DictConfig]) -> list[RunConfig]:
        """Check every job; a problem that several of them share is reported once."""
        checked: list[RunConfig] = []
        all_problems: dict[str, tuple[ConfigError, list[int]]] = {}  # by text, with the indices of the jobs
        for index, job_config in enumerate(composed):
            try:
                checked.append(self._check(job_config, job_config.hydra))
                if checked[-1].resume in ("auto", "never"):
                    continue
                problems = [ConfigError(key="resume", happened="names one run, but this is a sweep", expected="auto or never")]
            except ConfigErrors as errors:
                problems = errors.errors
            except ConfigError as error:
                problems = [error]
            for problem in problems:
                all_problems.setdefault(str(problem), (problem, []))[1].append(index)
        for problem, indices in all_problems.values():
            if len(indices) < len(composed):
                others = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
                problem.happened += f" (in the job {' '.join(texts(composed[indices[0]].hydra.overrides.task))}{others})"
        all_problems |= {str(problem): (problem, []) for problem in schedule.problems(checked, self._settings, plans_all=self._plans_all)}
        folders = [job_config.hydra.runtime.output_dir for job_config in composed]
        for folder in dict.fromkeys(folders):
            problems = check_below(self.sweep.root, Path(folder), key="hydra.sweep.subdir")
            problems += config_check.check_folder(folder, key="hydra.sweep.subdir")
            all_problems |= {str(problem): (problem, []) for problem in problems}
            if folders.count(folder) > 1:
                all_problems[folder] = (_shared_folder(folder), [])
        if all_problems:
            raise ConfigErrors(problem for problem, _ in all_problems.values())
        return checked

    def _swept(self) -> list[str]:
        """Return the keys that differ between the jobs; for a config group, the section of its name."""
        return [key.lstrip("+").partition("@")[0].replace("/", ".") for key in self.sweep.keys]

    def _recall(self, identity: str) -> SweepJob | None:
        """Return the job of an earlier attempt that computed the same, each job once. `resume` has tried failed ones again before."""
        identities = [job.identity for job in self._earlier]
        return self._earlier.pop(identities.index(identity)) if identity in identities else None

    def _freeze(self, composed: DictConfig, checked: RunConfig) -> tuple[SweepJob, Job]:
        """Write a job's config into its folder; later edits of the YAML do not change it."""
        run_folder = RunFolder(Path(composed.hydra.runtime.output_dir))
        overrides = texts(composed.hydra.overrides.task)
        entry = SweepJob(
            number=composed.hydra.job.num,
            folder=str(run_folder.root.relative_to(self.sweep.root)),
            overrides=overrides,
            identity=identity(checked.tree, swept=self._swept()),
        )
        if any(job.folder == entry.folder for job in self.sweep.jobs):
            raise _shared_folder(run_folder.root)
        if composed.hydra.output_subdir:
            save_as_hydra(composed, run_folder.root / composed.hydra.output_subdir)
        run_folder.record_config(checked.yaml())
        self.sweep.jobs.append(entry)
        return entry, Job(config=checked, run_folder=run_folder, command=list(sys.argv), overrides=overrides, in_sweep=True)

    def _on_start(self, entry: SweepJob) -> None:
        self._screen.began(entry)
        if entry.number in self._contexts:  # of this command, and not of an earlier attempt
            context, job_config = self._contexts[entry.number]
            context.callbacks.on_job_start(config=job_config, task_function=lambda composed: None)  # it runs elsewhere

    def _on_end(self, entry: SweepJob) -> None:
        self._screen.ended(entry)
        if entry.number in self._contexts:
            context, job_config = self._contexts[entry.number]
            context.callbacks.on_job_end(config=job_config, job_return=self._job_return(entry))

    def _job_return(self, entry: SweepJob) -> JobReturn:
        """Return a job's result for the sweeper: the metric, or an exception for a job that has none."""
        _, config = self._contexts[entry.number]
        result = JobReturn(overrides=entry.overrides, cfg=config, hydra_cfg=config, working_dir=str(self.sweep.root / entry.folder))
        result.status, result.return_value = JobStatus.COMPLETED, entry.metric
        if entry.metric is None and config.hydra.sweeper._target_ != BASIC_SWEEPER:  # Hydra's own reads it only to raise
            result.status = JobStatus.FAILED
            result.return_value = RuntimeError(f"job {entry.number} of {self.sweep.root} is {entry.status} and has no metric")
        return result


def _stops_at(job: Job, asks_slurm: bool) -> float | None:
    """Return when the sweep has to stop, from the first job's settings: the machine is the same for all."""
    settings = job.config.cluster
    if engine_name_of(settings) is not None:
        settings = replace(settings, walltime=None)  # each job of an engine has its own
    return stops_at(settings, asks_slurm=asks_slurm)


def _shared_folder(folder: Path | str) -> ConfigError:
    return ConfigError(key="hydra.sweep.subdir", happened=f"two jobs of the sweep have the folder {folder}", expected="one folder per job")
