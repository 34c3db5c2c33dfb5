"""What `ddp-train plan` shows: facts with their names in front, and commands as they can be pasted."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ddp_train.checkpoint.schedule import in_units
from ddp_train.cli.pipeline import require_possible
from ddp_train.config.cluster import processes_of_nodes
from ddp_train.config.command.composition import TYPED, Composition
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import saved_config
from ddp_train.config.schema import SweepConfig
from ddp_train.config.spelling import text_of, without_secrets
from ddp_train.config.values import seconds_of
from ddp_train.errors import ConfigError, printable
from ddp_train.launch.job import Job
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import duration, progress_of
from ddp_train.system import devices
from ddp_train.system.files import tail
from ddp_train.system.redaction import redact

_LABEL = 9  # characters, as in the lines that a run begins with
_JOBS_SHOWN = 40
_RUNS_READ = 20  # of the newest ones: each costs the reading of a YAML
_RECORDS = 20  # of the newest ones of training, of which the median counts
_TAIL_BYTES = 1 << 16


class Screen:
    """A plan, part by part, and shown at the end. Nothing of it holds a secret or is obeyed by a terminal."""

    def __init__(self) -> None:
        self._lines: list[Text] = []

    def fact(self, label: str, *lines: str) -> None:
        """Add lines behind one label, each whole: a command can be pasted."""
        for place, line in enumerate(lines):
            self._lines.append(Text.assemble((f"{'' if place else label:<{_LABEL}}", "bold"), _safe(line)))

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._lines += [Text(), Text(_safe(text), style="bold")]

    def table(self, rows: Iterable[Sequence[str]]) -> None:
        """Add rows in columns, each on one line, however long: it can be searched, and pasted."""
        shown = [[_safe(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            self.fact("", "  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def block(self, text: str) -> None:
        """Add a file's text as it is, but for what a terminal would obey."""
        self._lines += [Text(f"  | {_safe(line)}", style="dim") for line in text.splitlines()]

    def show(self) -> None:
        """Print it."""
        console = Console(file=sys.stdout, highlight=False)
        for line in self._lines:
            console.print(line, soft_wrap=True)


def command(words: Iterable[str]) -> str:
    """Return a command as it can be pasted into a shell: bash and zsh read `$'...'`, in which nothing is left that a terminal obeys."""
    return " ".join(map(_word, words))


def as_typed(found: Path) -> str:
    """Return a path as a person would type it."""
    return _word(RunFolder(found).shown())


def jobs(screen: Screen, folder: Path, found: Sequence[Job], settings: SweepConfig, *, decides: str | None) -> None:
    """List the jobs of a sweep; where a sweeper decides as it goes, say which one."""
    screen.fact("sweep", as_typed(folder))
    if decides is not None:
        screen.fact("jobs", f"hydra/sweeper={decides} chooses their values as it goes; what follows is a job without them")
        return
    at_a_time = "one after another" if settings.parallel_jobs == 1 else f"{settings.parallel_jobs} at a time"
    screen.fact("jobs", f"{len(found)}, {at_a_time}; after one that fails: sweep.on_failure={settings.on_failure}")
    values = [{key: value for key, _, value in (text.partition("=") for text in job.overrides)} for job in found]
    swept = [key for key in values[0] if len({each.get(key) for each in values}) > 1]
    rows = [("job", *swept, "batch", "folder")]
    for number, job in enumerate(found[:_JOBS_SHOWN]):
        folder_of_job = str(job.run_folder.root.relative_to(folder))
        rows.append((str(number), *(values[number][key] for key in swept), str(job.config.batch), folder_of_job))
    screen.table(rows)
    if len(found) > _JOBS_SHOWN:
        screen.fact("", f"and {len(found) - _JOBS_SHOWN} more")
    screen.fact("", "what follows is job 0")


def pipeline(screen: Screen, job: Job) -> None:
    """Say what the run waits for, and which weights it begins with."""
    for folder in job.config.runs_before():
        screen.fact("after", f"{as_typed(folder)}   ({progress_of(RunFolder(folder), require_possible(folder))})")
    if job.config.init_from is not None:
        screen.fact("weights", f"{job.config.init_from}   (chosen when the run begins)")


def configuration(screen: Screen, composition: Composition, left_out: Iterable[str]) -> None:
    """Say who chose each option, where the values come from that are not their options' own, and what was left out."""
    choices = composition.choices
    chosen = sorted((each for each in choices if each.source == TYPED or each.instead_of), key=lambda each: each.source != TYPED)
    others = [f"{each.group}={each.option}" for each in choices if each not in chosen and each.option != "None"]
    screen.heading("Options")
    screen.table(
        (f"{each.group}={each.option}", each.source, f"instead of {each.instead_of}" if each.instead_of not in ("", "None") else "")
        for each in chosen
    )
    screen.fact("", f"{'others' if chosen else 'all'} by default: {' '.join(others)}")
    screen.heading("Values that differ from those of the options")
    rows = []
    for each in composition.values:
        text, *before = (text_of(without_secrets(each.key, value)) for value in (each.value, *(value for value, _ in each.instead_of)))
        replaced = ", ".join(f"{value} ({source})" for value, (_, source) in zip(before, each.instead_of, strict=True))
        rows.append((f"{each.key}={text}", each.source, f"instead of {replaced}" if replaced else "added"))
    screen.table(rows)
    screen.fact("", *(f"~{key}   {TYPED}" for key in composition.removed))
    screen.fact("", *([] if rows or composition.removed else ["none"]), *left_out)


def sizes(screen: Screen, job: Job, found: Mapping[str, Any] | str) -> None:
    """Say how many ranks there are, how large the batch, the model and the checkpoints, or why they could not be measured."""
    config, machines = job.config, processes_of_nodes(job.config.cluster)
    ranks = f"{config.batch.world_size} on {devices.resolve_device(config.cluster.device)}"
    if len(set(machines)) > 1:
        ranks += f": {' + '.join(map(str, machines))}, one number for each machine"
    elif len(machines) > 1:
        ranks += f": {len(machines)} machines x {machines[0]}"
    screen.heading("Sizes")
    screen.fact("ranks", ranks)
    screen.fact("batch", str(config.batch), *config.batch_notes())
    if isinstance(found, str):
        limits = {f"trainer.{name}": getattr(config.trainer, name) for name in ("max_steps", "max_epochs")}
        steps = " or ".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        screen.fact("model", f"{config.model['_target_']}; its size is not known here:", *found.splitlines())
    else:
        per_epoch = f"{found['steps_per_epoch']} per epoch" if found["steps_per_epoch"] else "epochs"
        epochs = f"{per_epoch} of {found['epoch_size']:,} samples" if found["epoch_size"] else "the data has no epochs"
        steps = f"{found['steps']:,} ({epochs})"
        _model(screen, found)
    screen.fact("steps", steps)
    screen.fact("tests", _evaluations(job))
    screen.fact("saves", *_saves(job, found))


def _model(screen: Screen, found: Mapping[str, Any]) -> None:
    trained = "all trained" if found["trained"] == found["parameters"] else f"{found['trained']:,} of them trained"
    screen.fact("model", f"{found['model']}, {found['parameters']:,} parameters, {trained}")
    screen.fact("layers", *found["layers"])
    kept = ", ".join(f"{part} {in_units(size)}" for part, size in found["rank_bytes"].items() if size)
    where = "in the host's memory for each rank" if found["on_host"] else "on each rank"
    memory = [f"{in_units(sum(found['rank_bytes'].values()))} {where}: {kept}; activations come on top"]
    if found["shards"] > 1:
        memory.append(f"{found['shards']} shards of the weights: a block's own come on top while it computes, too")
    screen.fact("memory", *memory)


def _evaluations(job: Job) -> str:
    if not (sets := job.config.evaluation_sets()):
        return "never: data.eval is null"
    every = job.config.evaluation.every_steps
    when = "after every epoch, and at the end" if every is None else f"every {every} steps, and at the end"
    return when if sets == ["data.eval"] else f"{when}: {', '.join(sets)}"


def _saves(job: Job, found: Mapping[str, Any] | str) -> list[str]:
    """Say when checkpoints are saved, and where sizes are known how much room they take."""
    keep, folder = job.config.checkpoint, job.run_folder.root
    when = ["after each evaluation"] if keep.every_evaluation and job.config.evaluation_sets() else []
    when += [f"every {keep.every_minutes:g} minutes"] if keep.every_minutes is not None else []
    when += [f"every {keep.every_steps} steps"] if keep.every_steps is not None else []
    lines = [", ".join([*when, "at the end"])]
    if not isinstance(found, str):
        kept = {"keep_last": keep.keep_last, "keep_best": keep.keep_best, "one that is written": 1}
        kept |= {f"keep_every_steps={keep.keep_every_steps}": found["steps"] // keep.keep_every_steps} if keep.keep_every_steps else {}
        most, each = sum(kept.values()), found["checkpoint_bytes"]
        sum_of = " + ".join(f"{count} ({name})" for name, count in kept.items() if count)
        lines.append(
            f"{in_units(each)} each, weights and the optimizer's state; at most {sum_of} = {most} at a time, {in_units(most * each)}"
        )
        there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
        lines.append(f"{in_units(shutil.disk_usage(there).free)} are free in {_word(str(there))}")
    return lines


def newest_like(config: RunConfig, runs: Path) -> tuple[Path, float] | None:
    """Return the newest run in a folder, or in its `sweeps`, with the same model, data and precision, and its median seconds for a step."""
    files = [*runs.glob("*/metrics.jsonl"), *runs.glob("sweeps/*/*/metrics.jsonl")]
    with suppress(OSError):  # one that is just removed
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for folder in [file.parent for file in files[:_RUNS_READ]]:
        times = list[float]()
        for line in tail(folder / "metrics.jsonl", _TAIL_BYTES).splitlines():
            with suppress(ValueError, KeyError, TypeError):  # the first may be cut, and not each is of training
                times.append(json.loads(line)["step_ms"] / 1000)
        with suppress(ConfigError):  # of another version, say
            saved = saved_config(folder)
            if times and all(saved.get(name) == getattr(config, name) for name in ("model", "data", "amp")):
                return folder, median(times[-_RECORDS:])
    return None


def time(screen: Screen, job: Job, found: Mapping[str, Any] | str) -> None:
    """Say how long the run takes by the step time of an earlier one of this name, and whether its walltime is enough."""
    cluster, folder = job.config.cluster, job.run_folder.root
    limit_s = None if cluster.walltime is None else seconds_of(cluster.walltime) - cluster.grace_s
    ends = "" if limit_s is None else f"cluster.walltime={cluster.walltime}: it saves and stops after {duration(limit_s)}"
    steps = found["steps"] if isinstance(found, Mapping) else job.config.trainer.max_steps
    past = newest_like(job.config, next((parent.parent for parent in folder.parents if parent.name == "sweeps"), folder.parent))
    if past is None:
        lines = ["not known: no run of this name has had this model, data and precision"]
    else:
        lines = [f"{1000 * past[1]:.4g} ms a step in {as_typed(past[0])}, the newest run with this model, data and precision"]
    if past is not None and steps is not None:
        steps = max(0, steps - max(job.run_folder.saved_steps(), default=0))
        seconds = steps * past[1]
        lines = [f"about {duration(seconds)} for {steps:,} steps: {lines[0]}", "without starting, evaluations and waiting for checkpoints"]
        if limit_s is not None:
            starts = math.ceil(seconds / limit_s)
            ends += f", which is {'enough' if starts <= 1 else f'too short: the run has to be started {starts} times'}"
    lines += [ends] if ends else []
    with suppress(OSError, ValueError, KeyError, TypeError):
        batch = json.loads((past[0] / "environment.json").read_text())["batch"] if past else str(job.config.batch)
        lines += [f"that run had another batch: {batch}"] if batch != str(job.config.batch) else []
    screen.fact("time", *lines)


def _word(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    escaped = os.fsencode(text).decode("latin-1").encode("unicode_escape").decode()  # byte by byte: one may be no UTF-8
    return "$'" + escaped.replace("'", "\\'") + "'"


def _safe(text: str) -> str:
    """Return text without secrets, on one line, of which a terminal obeys nothing."""
    return printable(redact(text)).replace("\n", "\\n").replace("\t", "\\t")
