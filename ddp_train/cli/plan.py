"""`ddp-train plan`: show everything that a command would do. Nothing is started or submitted, and nothing is written."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_train.cli import compose, plan_text
from ddp_train.cli.location import Location, location_of, location_of_sweep
from ddp_train.cli.measure import measuring
from ddp_train.cli.plan_text import Screen, as_typed
from ddp_train.config.check import checked_section
from ddp_train.config.cluster import ENGINES, rendezvous_of
from ddp_train.config.command.command_line import options_first, require_config
from ddp_train.config.command.composition import Composition, loader_of, parse
from ddp_train.config.schema import SweepConfig
from ddp_train.config.tree import texts
from ddp_train.errors import DONE, ConfigError, readable_size
from ddp_train.launch import local
from ddp_train.launch.engine.engine import engine_of
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.source_copy import Code, read_source
from ddp_train.launch.submit import spec_of
from ddp_train.run_folder.claim import require_empty
from ddp_train.run_folder.sweep import Sweep
from ddp_train.sweep.hydra_jobs import Multirun
from ddp_train.sweep.sweeper import planned_overrides
from ddp_train.system.folder_lock import is_locked

USAGE = """ddp-train plan key=value group=option ... [-m] [--json]

  Shows what the same words without `plan` would start: the source of each option and value, the sizes of the batch, the model and the
  checkpoints, the number of steps and their time, the run folder, and every command and file.
  plan starts, submits and writes nothing. Exit code 0, or 2 if the configuration is wrong.
  --json: the same as one JSON object, docs/howto/programs.md.
"""

_WRITTEN = "config.yaml, .hydra, environment.json, metrics.jsonl, tensorboard, logs, checkpoints and result.json in each run folder"


def plan(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train plan key=value ...`: show what the same words without `plan` would do."""
    sys.dont_write_bytecode = True  # of the user's modules, which the check imports
    words = options_first([word for word in arguments if word != "--json"])
    sys.argv[1:] = words  # as Hydra would read them: the explanation of its errors reads them there
    args = parse(words)
    version.setbase("1.3")
    loader = loader_of(args)
    require_config(args, loader)
    mode = RunMode.MULTIRUN if args.multirun else RunMode.RUN
    composed = loader.load_configuration(args.config_name or "config", args.overrides, run_mode=mode)
    screen = Screen()
    screen.fact("plan", shlex.join(["ddp-train", *words]), "This is the plan. Nothing is started or written.")
    if args.multirun:
        _plan_sweep(screen, loader, composed, words, runner)
    else:
        _plan_run(screen, loader, composed)
    (screen.show_json if "--json" in arguments else screen.show)()  # only a complete plan
    return DONE


def _plan_run(screen: Screen, loader: Any, composed: DictConfig) -> None:
    checked = compose.check_composed(composed, composed.hydra)
    location = location_of(composed, checked)
    _require_free(location)
    if location.is_continued:
        location.require_same(checked)
    job = compose.job_of(checked, composed.hydra, location.folder)
    kind = f"the run there continues {job.run_folder.resume_point_text()}" if location.is_continued else "a new run"
    named = "; the name has the time of the start" if location.is_new else ""
    screen.fact("run", f"{as_typed(location.folder)}   ({kind}{named})")
    _show(screen, loader, composed, [job])


def _plan_sweep(screen: Screen, loader: Any, base: DictConfig, words: list[str], runner: JobRunner) -> None:
    """Show the jobs of a sweep, and the plan of its first job."""
    compose.require_our_launcher(base)
    location = location_of_sweep(base)
    _require_free(location)
    compose.fix_sweep_folder(base, folder := location.folder)
    overrides = planned_overrides(loader, base)
    settings = checked_section(base, SweepConfig)
    multirun = Multirun(Sweep(root=folder, command=words), settings, runner, compose.check_composed)
    parser = OverridesParser.create(config_loader=loader)
    of_all_jobs = [text for text in texts(base.hydra.overrides.task) if not parser.parse_override(text).is_sweep_override()]
    composed, checked = multirun.compose(loader, base, overrides or [of_all_jobs])
    pairs = zip(composed, checked, strict=True)
    jobs = [compose.job_of(config, job_config.hydra, Path(job_config.hydra.runtime.output_dir)) for job_config, config in pairs]
    sweeper = None if overrides is not None else str(base.hydra.runtime.choices["hydra/sweeper"])
    plan_text.show_jobs(screen, folder, jobs, settings, sweeper=sweeper)
    _show(screen, loader, composed[0], jobs, sweep=folder)


def _require_free(location: Location) -> None:
    """Refuse a typed folder in which another run works, or in which something lies that is not continued."""
    folder, key, is_new, is_continued = location
    if not is_new and folder.is_dir() and is_locked(folder):
        raise ConfigError(key=key, happened=f"another run is working in {folder}", expected="a separate folder for each run and sweep")
    if not is_new and not is_continued and folder.exists():
        require_empty(folder, key=key)


def _show(screen: Screen, loader: Any, composed: DictConfig, jobs: Sequence[Job], *, sweep: Path | None = None) -> None:
    """Show the origin of the first job's configuration, its sizes and its time, and how all jobs of a sweep are started."""
    job, cluster = jobs[0], jobs[0].config.cluster
    with measuring(job.config) as wait_for_sizes:
        composition = Composition(loader, composed)
        sizes = wait_for_sizes()
    plan_text.show_pipeline(screen, job)
    plan_text.show_configuration(screen, composition, job.config.left_out)
    plan_text.show_sizes(screen, job, sizes)
    plan_text.show_time(screen, job, sizes)
    screen.heading("How it is started")
    screen.fact("writes", f"{_WRITTEN}: `ddp-train help docs/run_folder.md`")
    if cluster.launcher in ENGINES:
        _show_submission(screen, jobs, sweep)
    elif cluster.launcher == "machines":
        screen.fact("type", *_on_each_machine(job))
    elif sweep is None:
        screen.fact("agent", f"torchrun's, in a process that `ddp-train` forks, with {shlex.join(local.arguments_for(job))}")
        screen.fact("ranks", f"{shlex.join([sys.executable, '-u', '-m', 'ddp_train'])}, started by the agent")
    else:
        screen.fact("agent", "torchrun's, in a process that `ddp-train` forks; its ranks are forked for each job of a sweep")


def _show_submission(screen: Screen, jobs: Sequence[Job], sweep: Path | None) -> None:
    """Show the files and commands of an engine. ConfigError: it refuses them."""
    config, run_folder = jobs[0].config, jobs[0].run_folder
    target, parallel = (run_folder.code, 1) if sweep is None else (sweep / "launch/code_HASH", config.sweep.parallel_jobs)
    source = read_source(limit_mib=config.cluster.code_limit_mib)
    code = Code(folder=str(target), hash="", roots=source.roots)
    # A command that waits submits the jobs one by one.
    specs = [spec_of(job, code, parallel=parallel) for job in (jobs[:1] if config.cluster.wait else jobs)]
    engine = engine_of(config.cluster.launcher)
    rendered = engine.render(specs)
    files = f"{len(source.files):,} source files, {readable_size(source.num_bytes)}"
    screen.fact("code", f"{files}, are copied to {as_typed(target)}; later edits do not reach the run")
    screen.fact("spec", f"{as_typed(run_folder.spec)}: the frozen job, its shape, and the hash of the code")
    _show_files(screen, rendered.files)
    if held := engine.allocation():
        screen.fact("step", f"not submitted: it runs at once in the allocation (job {held.id}), as a step of {held.starter} with task.sh")
    else:
        screen.fact("runs", *map(shlex.join, rendered.commands))


def _show_files(screen: Screen, files: Mapping[Path, str]) -> None:
    """Show files as they would be written; of those that differ only by the job or the machine, the first."""
    by_pattern: dict[str, list[Path]] = {}
    for file in files:
        by_pattern.setdefault(re.sub(r"\d+", "N", file.name), []).append(file)
    for name, (first, *others) in by_pattern.items():
        screen.fact("file", as_typed(first))
        screen.block(files[first])
        if others:
            screen.fact("files", f"{len(others)} more {name}, one for each {'machine' if 'N' in name else 'job'}")


def _on_each_machine(job: Job) -> Iterator[str]:
    rendezvous = rendezvous_of(job.config.cluster, os.environ)
    typed = shlex.join(["ddp-train", *(text for text in job.command[1:] if not text.startswith("cluster.node_rank="))])
    if job.config.cluster.node_rank is None and rendezvous.node_rank is not None:
        yield f"{typed}   on each machine; its number comes from the environment, and is {rendezvous.node_rank} here"
    else:
        yield f"{typed} cluster.node_rank=0   on the machine of {rendezvous.endpoint}"
        yield f"{typed} cluster.node_rank=N   on each other one, N from 1 to {rendezvous.max_nodes - 1}"
