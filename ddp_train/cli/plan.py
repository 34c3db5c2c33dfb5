"""`ddp-train plan`: everything that a command would do. Nothing is started or submitted, and nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.cli import plan_commands, plan_text
from ddp_train.cli.compose import RunLocation, check_composed, fix_sweep_place, location_of, require_our_launcher, require_same, sweep_place
from ddp_train.cli.measure import measuring
from ddp_train.config.check import section
from ddp_train.config.command.composition import Composition, loader_of, parse
from ddp_train.config.command.options import options_first, options_of, refuse_unknown_options, require_config
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import SweepConfig
from ddp_train.config.tree import texts
from ddp_train.errors import DONE, ConfigError
from ddp_train.job import Job
from ddp_train.launch.launcher import Launcher, Slot
from ddp_train.run_folder.claim import require_empty
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.sweep import Sweep, is_sweep
from ddp_train.sweep.hydra_jobs import Multirun
from ddp_train.sweep.sweeper import planned_overrides
from ddp_train.system.folder_lock import is_held

USAGE = """ddp-train plan key=value group=option ... [-m]

  The same words without `plan` would start something. With it they say what: who chose each option and gave each value, the sizes of the
  batch, the model and the checkpoints, the steps and how long they take, where the run goes, and every command and file.
  Nothing is started or submitted, and nothing is written. Exit code 0, or 2 where the configuration is wrong.
"""


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
        found, given = answer(), plan_commands.submitted([job])  # before anything is shown: it may be refused
    screen = _begin()
    plan_text.place(screen, place.folder, is_new=place.is_new, continues=job.run_folder.continues() if place.is_continued else None)
    _show_run(screen, composition, job, found)
    plan_commands.show(screen, [job], given)
    return DONE


def _begin() -> plan_text.Screen:
    screen = plan_text.Screen()
    screen.fact(
        "plan", plan_text.command(["ddp-train", *sys.argv[1:]]), "This is what it would do. Nothing is started, nothing is written."
    )
    return screen


def _show_run(screen: plan_text.Screen, composition: Composition, job: Job, found: Mapping[str, Any] | str) -> None:
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
        found, given = answer(), plan_commands.submitted(jobs, sweep=folder, parallel=settings.parallel_jobs)
    screen = _begin()
    decides = None if overrides is not None else str(base.hydra.runtime.choices["hydra/sweeper"])
    plan_text.jobs(screen, folder, jobs, settings, decides=decides)
    _show_run(screen, composition, jobs[0], found)
    plan_commands.show(screen, jobs, given)


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
