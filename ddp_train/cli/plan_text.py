"""What `ddp-train plan` shows: facts with their names in front, and commands as they can be pasted."""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ddp_train.checkpoint.schedule import in_units
from ddp_train.cli.pipeline import require_possible
from ddp_train.config.cluster import processes_of_nodes
from ddp_train.config.command.composition import TYPED, Composition, Value
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import saved_config
from ddp_train.config.schema import CheckpointConfig, SweepConfig
from ddp_train.config.spelling import text_of, without_secrets
from ddp_train.config.values import seconds_of
from ddp_train.errors import ConfigError, printable
from ddp_train.job import Job
from ddp_train.redaction import redact
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import progress_of
from ddp_train.system import devices
from ddp_train.system.files import tail

_LABEL = 9  # characters, as in the lines that a run begins with
_JOBS_SHOWN = 40
_VALUE_SHOWN = 60  # characters of a value that was replaced
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_RUNS_READ = 20  # of the newest ones: each costs the reading of a YAML
_RECORDS = 20  # of the newest ones of training, of which the median counts
_TAIL_BYTES = 1 << 16


class Screen:
    """Prints a plan, part by part. Nothing that is shown holds a secret or obeys a terminal."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)

    def fact(self, label: str, *lines: str) -> None:
        """Print lines behind one label, each whole: a command can be pasted."""
        for place, line in enumerate(lines):
            text = Text(f"{'' if place else label:<{_LABEL}}", style="bold")
            text.append(_safe(line), style="not bold")
            self._console.print(text, soft_wrap=True)

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._console.print()
        self._console.print(Text(_safe(text), style="bold"))

    def table(self, rows: Iterable[Sequence[str]]) -> None:
        """Print rows in columns, each on one line, however long: it can be searched, and pasted."""
        shown = [[_safe(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            self.fact("", "  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def block(self, text: str) -> None:
        """Print a file's text as it is, but for what a terminal would obey."""
        for line in text.splitlines():
            self._console.print(Text(f"  | {_safe(line)}", style="dim"), soft_wrap=True)


def command(words: Iterable[str]) -> str:
    """Return a command as it can be pasted into a shell: bash and zsh read `$'...'`, in which nothing is left that a terminal obeys."""
    return " ".join(map(_word, words))


def as_typed(found: Path) -> str:
    """Return a path as a person would type it."""
    return _word(RunFolder(found).shown())


def place(screen: Screen, folder: Path, *, is_new: bool, continues: str | None) -> None:
    """Say where a run goes.

    Args:
        is_new: the folder was not typed.
        continues: where the run goes on; None for one that begins.
    """
    what = "a new run" if continues is None else f"the run there continues {continues}"
    screen.fact("run", f"{as_typed(folder)}   ({what}{'; the name is that of the moment when it starts' if is_new else ''})")


def jobs(screen: Screen, folder: Path, found: Sequence[Job], settings: SweepConfig, *, decides: str | None) -> None:
    """List the jobs of a sweep.

    Args:
        decides: the sweeper that chooses values as it goes; None: all jobs are known.
    """
    screen.fact("sweep", as_typed(folder))
    if decides is not None:
        screen.fact("jobs", f"hydra/sweeper={decides} chooses their values as it goes; what follows is a job without them")
        return
    at_a_time = "one after another" if settings.parallel_jobs == 1 else f"{settings.parallel_jobs} at a time"
    screen.fact("jobs", f"{len(found)}, {at_a_time}; after one that fails: sweep.on_failure={settings.on_failure}")
    values = [{key: value for key, _, value in (text.partition("=") for text in job.overrides)} for job in found]
    swept = [key for key in values[0] if len({each.get(key) for each in values}) > 1]
    rows = [("job", *swept, "batch", "folder")]
    for job, value in list(zip(found, values, strict=True))[:_JOBS_SHOWN]:
        name = str(job.run_folder.root.relative_to(folder)) if job.run_folder.root.is_relative_to(folder) else str(job.run_folder.root)
        rows.append((str(len(rows) - 1), *(value[key] for key in swept), str(job.config.batch), name))
    screen.table(rows)
    if len(found) > _JOBS_SHOWN:
        screen.fact("", f"and {len(found) - _JOBS_SHOWN} more")
    screen.fact("", "what follows is job 0")


def configuration(screen: Screen, composition: Composition, left_out: Iterable[str]) -> None:
    """Say who chose each option, where the values come from that are not their options' own, and what was left out."""
    choices = composition.choices
    chosen = sorted((each for each in choices if each.source == TYPED or each.instead_of), key=lambda each: each.source != TYPED)
    others = [each for each in choices if each not in chosen and each.option != "None"]
    screen.heading("Options")
    screen.table(
        (f"{each.group}={each.option}", each.source, f"instead of {each.instead_of}" if each.instead_of not in ("", "None") else "")
        for each in chosen
    )
    screen.fact("", f"{'others' if chosen else 'all'} by default: {' '.join(f'{each.group}={each.option}' for each in others)}")
    values = composition.values
    screen.heading("Values that differ from those of the options")
    screen.table((f"{each.key}={_value(each.key, each.value)}", each.source, _replaced(each)) for each in values)
    for key in composition.removed:
        screen.fact("", f"~{key}   {TYPED}")
    if not values and not composition.removed:
        screen.fact("", "none")
    for line in left_out:
        screen.fact("", line)


def _replaced(value: Value) -> str:
    if not value.instead_of:
        return "added"
    replaced = {_value(value.key, before, most=_VALUE_SHOWN): source for before, source in reversed(value.instead_of)}  # each value once
    return "instead of " + ", ".join(f"{before} ({source})" for before, source in reversed(replaced.items()))


def sizes(screen: Screen, job: Job, found: Mapping[str, Any] | str) -> None:
    """Say how many ranks there are, and how large the batch, the model and the checkpoints.

    Args:
        found: what was measured, or why it could not be.
    """
    config, cluster = job.config, job.config.cluster
    machines, device = processes_of_nodes(cluster), devices.resolve_device(cluster.device)
    ranks = f"{config.batch.world_size} on {device}"
    if len(set(machines)) > 1:
        ranks += f": {' + '.join(map(str, machines))}, one number for each machine"
    elif len(machines) > 1:
        ranks += f": {len(machines)} machines x {machines[0]}"
    screen.heading("Sizes")
    screen.fact("ranks", ranks)
    screen.fact("batch", str(config.batch), *config.batch_notes())
    if isinstance(found, str):
        screen.fact("model", f"{config.model['_target_']}; its size is not known here:", *found.splitlines())
        screen.fact("steps", _steps_without(job))
        screen.fact("tests", _evaluations(job))
        screen.fact("saves", _saves(config.checkpoint, job))
        return
    trained = "all trained" if found["trained"] == found["parameters"] else f"{found['trained']:,} of them trained"
    screen.fact("model", f"{found['model']}, {found['parameters']:,} parameters, {trained}")
    if found["layers"]:
        screen.fact("layers", *found["layers"])
    kept = {part: size for part, size in found["rank_bytes"].items() if size}
    spelled = ", ".join(f"{part} {in_units(size)}" for part, size in kept.items())
    cut = [] if found["shards"] == 1 else [f"{found['shards']} shards of the weights: a block's own come on top while it computes, too"]
    where = "in the host's memory for each rank" if found["on_host"] else "on each rank"
    screen.fact("memory", f"{in_units(sum(kept.values()))} {where}: {spelled}; activations come on top", *cut)
    per_epoch = f"{found['steps_per_epoch']} per epoch" if found["steps_per_epoch"] else "epochs"
    epoch = f"{per_epoch} of {found['epoch_size']:,} samples" if found["epoch_size"] else "the data has no epochs"
    screen.fact("steps", f"{found['steps']:,} ({epoch})")
    screen.fact("tests", _evaluations(job))
    keep = config.checkpoint
    kept = {"keep_last": keep.keep_last, "keep_best": keep.keep_best, "one that is written": 1}
    kept |= {f"keep_every_steps={keep.keep_every_steps}": found["steps"] // keep.keep_every_steps} if keep.keep_every_steps else {}
    most, each = sum(kept.values()), found["checkpoint_bytes"]
    spelled = " + ".join(f"{count} ({name})" for name, count in kept.items() if count)
    screen.fact(
        "saves",
        _saves(keep, job),
        f"{in_units(each)} each, weights and the optimizer's state; at most {spelled} = {most} at a time, {in_units(most * each)}",
        _free(job.run_folder.root),
    )


def _steps_without(job: Job) -> str:
    trainer = job.config.trainer
    limits = [f"trainer.{name}={value}" for name in ("max_steps", "max_epochs") if (value := getattr(trainer, name)) is not None]
    return " or ".join(limits) + (", whichever comes first" if len(limits) > 1 else "")


def _evaluations(job: Job) -> str:
    if not (sets := job.config.evaluation_sets()):
        return "never: data.eval is null"
    every = job.config.evaluation.every_steps
    when = "after every epoch, and at the end" if every is None else f"every {every} steps, and at the end"
    return when if sets == ["data.eval"] else f"{when}: {', '.join(sets)}"


def _saves(keep: CheckpointConfig, job: Job) -> str:
    when = ["after each evaluation"] if keep.every_evaluation and job.config.evaluation_sets() else []
    when += [f"every {keep.every_minutes:g} minutes"] if keep.every_minutes is not None else []
    when += [f"every {keep.every_steps} steps"] if keep.every_steps is not None else []
    return ", ".join([*when, "at the end"])


def _free(folder: Path) -> str:
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    return f"{in_units(shutil.disk_usage(there).free)} are free in {command([str(there)])}"


class Past(NamedTuple):
    """The step time of an earlier run."""

    folder: Path
    step_ms: float
    batch: str  # its identity, in words; "" where it is not known


def newest_like(config: RunConfig, runs: Path) -> Past | None:
    """Return the newest run with the same model, data and precision; None where there is none.

    Args:
        runs: the folder that holds runs, and `sweeps`.
    """
    files = [*runs.glob("*/metrics.jsonl"), *runs.glob("sweeps/*/*/metrics.jsonl")]
    with suppress(OSError):  # one that is just removed
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[:_RUNS_READ]:
        with suppress(ConfigError):  # of another version, say
            saved = saved_config(file.parent)
            is_alike = all(saved.get(name) == getattr(config, name) for name in ("model", "data", "amp"))
            if is_alike and (times := _step_times(file)):
                batch = ""
                with suppress(OSError, ValueError, KeyError, TypeError):
                    batch = str(json.loads((file.parent / "environment.json").read_text())["batch"])
                return Past(file.parent, statistics.median(times), batch)
    return None


def _step_times(metrics: Path) -> list[float]:
    times = []
    for line in tail(metrics, _TAIL_BYTES).splitlines():
        with suppress(ValueError, AttributeError):  # the first may be cut
            record = json.loads(line)
            if record.get("split") == "train" and isinstance(record.get("step_ms"), (int, float)):
                times.append(float(record["step_ms"]))
    return times[-_RECORDS:]


def time(screen: Screen, job: Job, found: Mapping[str, Any] | str) -> None:
    """Say how long the run takes by the step time of an earlier one of this name, and whether its walltime is enough."""
    cluster, folder = job.config.cluster, job.run_folder.root
    limit = None if cluster.walltime is None else seconds_of(cluster.walltime)
    ends = "" if limit is None else f": it saves and stops after {_duration(limit - cluster.grace_s)}"
    walltime = f"cluster.walltime={cluster.walltime}{ends}" if ends else ""
    sweeps = next((parent for parent in folder.parents if parent.name == "sweeps"), None)
    past = newest_like(job.config, folder.parent if sweeps is None else sweeps.parent)
    if past is None:
        screen.fact("time", "not known: no run of this name has had this model, data and precision", *([walltime] if walltime else []))
        return
    steps = found["steps"] if isinstance(found, Mapping) else job.config.trainer.max_steps
    per_step = f"{past.step_ms:.4g} ms a step in {as_typed(past.folder)}, the newest run with this model, data and precision"
    lines = [per_step if steps is None else ""]
    if steps is not None:
        steps = max(0, steps - max(job.run_folder.saved_steps(), default=0))
        seconds = steps * past.step_ms / 1000
        lines = [f"about {_duration(seconds)} for {steps:,} steps: {per_step}", "without starting, evaluations and waiting for checkpoints"]
        if limit is not None:
            lives = -(-seconds // (limit - cluster.grace_s))
            lines.append(f"{walltime}, which is {'enough' if lives <= 1 else f'too short: the run has to be started {lives:g} times'}")
    elif walltime:
        lines.append(walltime)
    if past.batch and past.batch != str(job.config.batch):
        lines.append(f"that run had another batch: {past.batch}")
    screen.fact("time", *lines)


def pipeline(screen: Screen, job: Job) -> None:
    """Say what the run waits for, and which weights it begins with."""
    for folder in job.config.runs_before():
        screen.fact("after", f"{as_typed(folder)}   ({progress_of(RunFolder(folder), require_possible(folder))})")
    if job.config.init_from is not None:
        screen.fact("weights", f"{job.config.init_from}   (chosen when the run begins)")


def _duration(seconds: float) -> str:
    """Write a time with two units at most."""
    minutes = round(seconds / _MINUTE)
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{minutes} min"
    if seconds < 2 * _DAY:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24} days {hours % 24} h"


def _value(key: str, value: Any, *, most: int | None = None) -> str:
    text = text_of(without_secrets(key, value))
    return text if most is None or len(text) <= most else f"{text[:most]}..."


def _word(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(char if char.isprintable() and char not in "\\'" else _escaped(char) for char in text) + "'"


def _escaped(char: str) -> str:
    code = ord(char)
    if char in "\\'":
        return f"\\{char}"
    if code < 0x80 or 0xDC80 <= code <= 0xDCFF:  # the second: a byte that is no UTF-8, as Python has it
        return f"\\x{code & 0xFF:02x}"
    return f"\\U{code:08x}"


def _safe(text: str) -> str:
    """Return text without secrets, on one line, of which a terminal obeys nothing."""
    return printable(redact(text)).replace("\n", "\\n").replace("\t", "\\t")
