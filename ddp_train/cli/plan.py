"""`ddp-train plan`: everything that a command would do. Nothing is started or submitted, and nothing is written."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.checkpoint.schedule import in_units
from ddp_train.cli import plan_text
from ddp_train.cli.compose import RunLocation, check_composed, fix_sweep_place, location_of, require_our_launcher, require_same, sweep_place
from ddp_train.cli.measure import measuring
from ddp_train.cli.plan_text import Screen, as_typed, command
from ddp_train.config.check import section
from ddp_train.config.cluster import rendezvous_of
from ddp_train.config.command.command_line import options_first, options_of, refuse_unknown_options, require_config
from ddp_train.config.command.composition import Composition, loader_of, parse
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import SweepConfig
from ddp_train.config.spelling import without_secrets
from ddp_train.config.tree import texts
from ddp_train.errors import DONE, ConfigError
from ddp_train.job import Job
from ddp_train.launch import local
from ddp_train.launch.agent_process import rank_environment
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import ENGINES, Rendered, engine_of
from ddp_train.launch.launcher import Launcher, Slot
from ddp_train.launch.source_copy import measure_source
from ddp_train.launch.submit import freeze
from ddp_train.run_folder.claim import require_empty
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep, is_sweep
from ddp_train.sweep.hydra_jobs import Multirun
from ddp_train.sweep.sweeper import planned_overrides
from ddp_train.system import devices, handover
from ddp_train.system.folder_lock import is_held

USAGE = """ddp-train plan key=value group=option ... [-m]

  The same words without `plan` would start something. With it they say what: who chose each option and gave each value, the sizes of the
  batch, the model and the checkpoints, the steps and how long they take, where the run goes, and every command and file.
  Nothing is started or submitted, and nothing is written. Exit code 0, or 2 where the configuration is wrong.
"""

_WRITTEN = "config.yaml, .hydra, environment.json, metrics.jsonl, tensorboard, logs, checkpoints and result.json in each run folder"
_LINES_SHOWN = 4  # of machines that differ by their number alone


def plan(arguments: list[str], launcher: Launcher) -> int:
    """`ddp-train plan key=value ...`: show what the same words without `plan` would do."""
    sys.dont_write_bytecode = True  # of the user's modules, which the check imports
    sys.argv[1:] = options_first(arguments)  # as they would be typed; what explains Hydra's errors reads them, too
    refuse_unknown_options(sys.argv[1:])
    args = parse(sys.argv[1:])
    version.setbase("1.3")
    loader = loader_of(args)
    require_config(args, loader)
    name = args.config_name or "config"
    if args.multirun:
        base = loader.load_configuration(name, args.overrides, run_mode=RunMode.MULTIRUN)
        _show_sweep(loader, base)
        return DONE
    composed = loader.load_configuration(name, args.overrides, run_mode=RunMode.RUN)
    checked = check_composed(composed, composed.hydra)
    place = location_of(composed, checked)
    _check_place(place, checked)
    job = _job(composed, checked, place.folder)
    with measuring(checked) as answer:
        composition = Composition(loader, composed, args.overrides)
        found, given = answer(), _submitted([job])  # before anything is shown: it may be refused
    screen = _begin()
    plan_text.place(screen, place.folder, is_new=place.is_new, continues=job.run_folder.continues() if place.is_continued else None)
    _show_run(screen, composition, job, found)
    _show_start(screen, [job], given)
    return DONE


def _begin() -> Screen:
    screen = Screen()
    screen.fact("plan", command(["ddp-train", *sys.argv[1:]]), "This is what it would do. Nothing is started, nothing is written.")
    return screen


def _show_run(screen: Screen, composition: Composition, job: Job, found: Mapping[str, Any] | str) -> None:
    """Show one run: where its configuration comes from, how large it is, and how long it takes."""
    plan_text.pipeline(screen, job)
    plan_text.configuration(screen, composition, job.config.left_out)
    plan_text.sizes(screen, job, found)
    plan_text.time(screen, job, found)


def _show_sweep(loader: Any, base: DictConfig) -> None:
    """Show the jobs of a sweep, and what is common to them by its first one."""
    require_our_launcher(base)
    folder = sweep_place(base)
    _require_free(folder, key="hydra.sweep.dir")
    if folder.exists() and not is_sweep(folder):  # a sweep would be taken up
        require_empty(folder, key="hydra.sweep.dir")
    fix_sweep_place(base, folder)
    overrides = planned_overrides(loader, base)
    settings = section(base, SweepConfig)
    multirun = Multirun(Sweep(root=folder, command=sys.argv[1:]), settings, _no_slots, check_composed)
    composed, checked = multirun.compose(loader, base, overrides or [_without_sweeps(loader, base)])
    jobs = [_job(each, config, Path(each.hydra.runtime.output_dir)) for each, config in zip(composed, checked, strict=True)]
    first = composed[0]
    with measuring(checked[0]) as answer:
        composition = Composition(loader, first, [*texts(first.hydra.overrides.hydra), *jobs[0].overrides])
        found, given = answer(), _submitted(jobs, sweep=folder, parallel=settings.parallel_jobs)
    screen = _begin()
    decides = None if overrides is not None else str(base.hydra.runtime.choices["hydra/sweeper"])
    plan_text.jobs(screen, folder, jobs, settings, decides=decides)
    _show_run(screen, composition, jobs[0], found)
    _show_start(screen, jobs, given)


def _job(composed: DictConfig, checked: RunConfig, folder: Path) -> Job:
    resume = Path(checked.resume)
    return Job(
        config=checked,
        run_folder=RunFolder(folder),
        command=list(sys.argv),
        overrides=texts(composed.hydra.overrides.task),
        options=options_of(composed.hydra),
        checkpoint=str(resume.absolute()) if is_checkpoint(resume) else None,
    )


def _check_place(place: RunLocation, checked: RunConfig) -> None:
    """Refuse a folder that the run would be refused."""
    if not place.is_new and place.folder.exists():
        _require_free(place.folder, key=place.key)
        if place.is_continued:
            require_same(place.folder, checked, key=place.key)
        else:
            require_empty(place.folder, key=place.key)


def _require_free(folder: Path, *, key: str) -> None:
    if folder.is_dir() and is_held(folder):
        raise ConfigError(key=key, happened=f"another run is working in {folder}", expected="a folder of its own for each run and sweep")


def _without_sweeps(loader: Any, base: DictConfig) -> list[str]:
    """Return what is typed for every job of a sweep."""
    parser = OverridesParser.create(config_loader=loader)
    return [text for text in texts(base.hydra.overrides.task) if not parser.parse_override(text).is_sweep_override()]


def _no_slots(folder: Path, count: int) -> Sequence[Slot]:
    raise AssertionError("nothing is run")


class _Submitted(NamedTuple):
    """What an engine would be given."""

    rendered: Rendered
    code: str  # in words: what is copied, and where to
    spec: Path  # of the first job
    allocation: str | None  # the job of SLURM in which it would run at once


def _submitted(jobs: Sequence[Job], *, sweep: Path | None = None, parallel: int = 1) -> _Submitted | None:
    """Return what an engine would be given for jobs; None where none starts them.

    Args:
        sweep: the folder of the sweep whose jobs they are.
        parallel: so many at a time.

    Raises:
        ConfigError: the engine refuses it.
    """
    cluster, run_folder = jobs[0].config.cluster, jobs[0].run_folder
    if cluster.launcher not in ENGINES:
        return None
    into = run_folder.code if sweep is None else sweep / "launch/code_HASH"
    code, count, size = measure_source(into, limit_mib=cluster.code_limit_mib)
    specs = [freeze(job, code, parallel=parallel) for job in (jobs[:1] if cluster.wait else jobs)]  # who waits submits one by one
    return _Submitted(
        rendered=engine_of(cluster.launcher).render(specs),
        code=f"{count:,} files of source, {in_units(size)}, are copied to {as_typed(into)}; later edits do not reach the run",
        spec=run_folder.spec,
        allocation=slurm_client.allocation() if cluster.launcher == "slurm" else None,
    )


def _show_start(screen: Screen, jobs: Sequence[Job], given: _Submitted | None) -> None:
    """Show how jobs are started: those of a sweep, or one."""
    cluster = jobs[0].config.cluster
    screen.heading("How it is started")
    screen.table(_environment(jobs[0]))
    screen.fact("writes", f"{_WRITTEN}: `ddp-train help docs/run_folder.md`")
    if given is not None:
        screen.fact("code", given.code)
        screen.fact("spec", f"{as_typed(given.spec)}: the frozen job, its shape, and the hash of the code")
        _show_files(screen, given.rendered.files)
        if given.allocation is None:
            screen.fact("runs", *map(command, given.rendered.commands))
        else:
            screen.fact(
                "step", f"not submitted: it runs at once in the allocation (job {given.allocation}), as a step of srun with task.sh"
            )
    elif cluster.launcher == "machines":
        screen.fact("type", *_on_each_machine(jobs[0]))
    elif len(jobs) == 1:
        screen.fact("agent", f"torchrun's, in a process that `ddp-train` forks, with {command(local.agent_arguments(jobs[0]))}")
        screen.fact("ranks", f"{command([sys.executable, '-u', '-m', 'ddp_train'])}, started by the agent")
    else:
        screen.fact("agent", "torchrun's, in a process that `ddp-train` forks; its ranks are forked for each job of a sweep")


def _show_files(screen: Screen, files: Mapping[Path, str]) -> None:
    """Show files as they would be written; of several that differ by the job or the machine, the first."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault(re.sub(r"\d+", "N", file.name), []).append(file)
    for name, (first, *others) in alike.items():
        screen.fact("file", as_typed(first))
        screen.block(files[first])
        if others:
            screen.fact("files", f"{len(others)} more {name}, one for each {'machine' if 'N' in name else 'job'}")


def _on_each_machine(job: Job) -> Iterator[str]:
    """Yield what is typed on each machine."""
    cluster = job.config.cluster
    found = rendezvous_of(cluster, os.environ)
    words = [text for text in job.command[1:] if not text.startswith("cluster.node_rank=")]

    def line(rank: str) -> str:
        return command(["ddp-train", *words, f"cluster.node_rank={rank}"])

    if cluster.node_rank is None and found.node_rank is not None:
        yield f"{command(['ddp-train', *words])}   on each machine; its number comes from the environment, and is {found.node_rank} here"
    elif found.max_nodes <= _LINES_SHOWN:
        yield from (line(str(rank)) for rank in range(found.max_nodes))
    else:
        yield f"{line('0')}   on the machine of {found.endpoint}"
        yield f"{line('N')}   on each other one, N from 1 to {found.max_nodes - 1}"


def _environment(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the variables that the ranks get, and why; secrets stay references."""
    cluster = job.config.cluster
    processes = devices.processes_per_node(cluster.processes_per_node, cluster.device)
    is_here = cluster.launcher not in ENGINES
    for name, value in rank_environment(processes, cluster.threads_per_process).items():
        if cluster.threads_per_process is not None:
            yield f"{name}={value}", "cluster.threads_per_process"
        else:
            yield f"{name}={value if is_here else '...'}", f"the cores of {'this' if is_here else 'the'} machine, shared out"
    for name, value in cluster.env.items():
        if value is not None:
            shown = str(int(value)) if isinstance(value, bool) else str(without_secrets(f"cluster.env.{name}", value))
            yield f"{name}={command([shown])}", "cluster.env"
    yield handover.JOB, "the frozen configuration"
    yield "RANK, WORLD_SIZE, MASTER_ADDR ...", "set by torchrun for each rank"
