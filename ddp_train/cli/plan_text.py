"""The text of `ddp-train plan`: facts behind their labels, and commands that can be pasted."""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ddp_train.cli.location import verdict_to_wait_for
from ddp_train.config.cluster import processes_of_nodes
from ddp_train.config.command.composition import TYPED, Composition
from ddp_train.config.run_config import RunConfig, evaluation_sets
from ddp_train.config.saved import saved_config
from ddp_train.config.schema import SweepConfig
from ddp_train.config.spelling import text_of, without_secrets
from ddp_train.config.tree import value_at
from ddp_train.errors import ConfigError, printable, readable_size
from ddp_train.launch.job import Job
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import duration, newest_record, progress_of
from ddp_train.system import devices
from ddp_train.system.redaction import redact

_BLOCK = "text"  # the label of the text of a file
_LABEL = 9  # characters, as in the lines that a run begins with
_JOBS_SHOWN = 40
_RUNS_READ = 20  # the newest ones: for each a YAML is read

_Fact = tuple[str, list[str]]  # a label, and lines


class Screen:
    """Collects the facts of a plan, without secrets and control characters, and prints them at the end."""

    def __init__(self) -> None:
        self._headings: list[tuple[str, list[_Fact]]] = [("", [])]  # "": of what comes before the first

    def fact(self, label: str, *lines: str) -> None:
        """Add lines behind one label. They are not wrapped: a command can be pasted."""
        self._headings[-1][1].append((label, [*map(_safe, lines)]))

    def heading(self, text: str) -> None:
        self._headings.append((_safe(text), []))

    def table(self, rows: Iterable[Sequence[str]]) -> None:
        """Add rows in columns. They are not wrapped: they can be searched, and pasted."""
        safe_rows = [[_safe(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*safe_rows, strict=True)]
        cells = ((set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)) for row in safe_rows)
        self.fact("", *("  ".join(row).rstrip() for row in cells))

    def block(self, text: str) -> None:
        self.fact(_BLOCK, *text.splitlines())

    def show(self) -> None:
        console = Console(file=sys.stdout, highlight=False)
        for heading, facts in self._headings:
            if heading:
                console.print(Text(f"\n{heading}", style="bold"), soft_wrap=True)
            for label, lines in facts:
                for number, line in enumerate(lines):
                    shown = Text.assemble((f"{'' if number else label:<{_LABEL}}", "bold"), line)
                    console.print(Text(f"  | {line}", "dim") if label == _BLOCK else shown, soft_wrap=True)

    def show_json(self) -> None:
        by_name = [(heading, [{"label": label, "lines": lines} for label, lines in facts]) for heading, facts in self._headings]
        print(json.dumps({"headings": [{"heading": heading, "facts": facts} for heading, facts in by_name]}))


def as_typed(path: Path) -> str:
    return shlex.quote(RunFolder(path).as_typed())


def show_jobs(screen: Screen, folder: Path, all_jobs: Sequence[Job], settings: SweepConfig, *, sweeper: str | None) -> None:
    """List the jobs of a sweep; `sweeper`: one that chooses the jobs while they run. None: all are known."""
    screen.fact("sweep", as_typed(folder))
    if sweeper is not None:
        screen.fact("jobs", f"hydra/sweeper={sweeper} chooses their values during the sweep; below is a job without them")
        return
    at_a_time = "one after another" if settings.parallel_jobs == 1 else f"{settings.parallel_jobs} at a time"
    screen.fact("jobs", f"{len(all_jobs)}, {at_a_time}; after one that fails: sweep.on_failure={settings.on_failure}")
    overrides = [{key: value for key, _, value in (text.partition("=") for text in job.overrides)} for job in all_jobs]
    swept = [key for key in overrides[0] if len({values.get(key) for values in overrides}) > 1]
    rows = [("job", *swept, "batch", "folder")]
    for number, job in enumerate(all_jobs[:_JOBS_SHOWN]):
        folder_of_job = str(job.run_folder.root.relative_to(folder))
        rows.append((str(number), *(overrides[number][key] for key in swept), str(job.config.batch), folder_of_job))
    screen.table(rows)
    if len(all_jobs) > _JOBS_SHOWN:
        screen.fact("", f"and {len(all_jobs) - _JOBS_SHOWN} more")
    screen.fact("", "below is job 0")


def show_pipeline(screen: Screen, job: Job) -> None:
    """Show the runs that this one waits for, and its initial weights."""
    for folder in job.config.runs_before():
        screen.fact("after", f"{as_typed(folder)}   ({progress_of(RunFolder(folder), verdict_to_wait_for(folder))})")
    if job.config.init_from is not None:
        screen.fact("weights", f"{job.config.init_from}   (chosen when the run begins)")


def show_configuration(screen: Screen, composition: Composition, left_out: Iterable[str]) -> None:
    """Show the source of each option, that of each value which differs from its option, and what was left out."""
    choices = composition.choices
    differing = [choice for choice in choices if choice.source == TYPED or choice.instead_of]
    chosen = sorted(differing, key=lambda choice: choice.source != TYPED)
    others = [f"{choice.group}={choice.option}" for choice in choices if choice not in chosen and choice.option != "None"]
    screen.heading("Options")
    replaced = [f"instead of {choice.instead_of}" if choice.instead_of not in ("", "None") else "" for choice in chosen]
    screen.table((f"{choice.group}={choice.option}", choice.source, text) for choice, text in zip(chosen, replaced, strict=True))
    screen.fact("", f"{'others' if chosen else 'all'} by default: {' '.join(others)}")
    screen.heading("Values that differ from those of the options")
    rows = []
    for item in composition.values:
        text, *before = (text_of(without_secrets(item.key, value)) for value in (item.value, *(value for value, _ in item.instead_of)))
        earlier = ", ".join(f"{value} ({source})" for value, (_, source) in zip(before, item.instead_of, strict=True))
        rows.append((f"{item.key}={text}", item.source, f"instead of {earlier}" if earlier else "added"))
    screen.table(rows)
    screen.fact("", *(f"~{key}   {TYPED}" for key in composition.removed))
    screen.fact("", *([] if rows or composition.removed else ["none"]), *left_out)


def show_sizes(screen: Screen, job: Job, measured: Mapping[str, Any] | str) -> None:
    """Show the number of ranks, the sizes of batch, model and checkpoints, or why they could not be measured."""
    config, machines = job.config, processes_of_nodes(job.config.cluster)
    ranks = f"{config.batch.world_size} on {devices.resolve_device(config.cluster.device)}"
    if len(set(machines)) > 1:
        ranks += f": {' + '.join(map(str, machines))}, one number for each machine"
    elif len(machines) > 1:
        ranks += f": {len(machines)} machines x {machines[0]}"
    screen.heading("Sizes")
    screen.fact("ranks", ranks)
    screen.fact("batch", str(config.batch), *config.batch_notes())
    if isinstance(measured, str):
        limits = {f"trainer.{name}": getattr(config.trainer, name) for name in ("max_steps", "max_epochs")}
        steps = " or ".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        screen.fact("model", f"{config.model['_target_']}; its size is not known here:", *measured.splitlines())
    else:
        per_epoch = f"{measured['steps_per_epoch']} per epoch" if measured["steps_per_epoch"] else "epochs"
        epochs = f"{per_epoch} of {measured['epoch_size']:,} samples" if measured["epoch_size"] else "the data has no epochs"
        steps = f"{measured['steps']:,} ({epochs})"
        _model(screen, measured)
    screen.fact("steps", steps)
    screen.fact("tests", _evaluations(job))
    screen.fact("saves", *_saves(job, measured))


def _model(screen: Screen, measured: Mapping[str, Any]) -> None:
    trained = "all" if measured["trained_parameters"] == measured["parameters"] else f"{measured['trained_parameters']:,} of them"
    screen.fact("model", f"{measured['model']}, {measured['parameters']:,} parameters, {trained} trained")
    screen.fact("layers", *measured["layers"])
    parts = ", ".join(f"{part} {readable_size(size)}" for part, size in measured["rank_bytes"].items() if size)
    where = "in the host's memory for each rank" if measured["on_host"] else "on each rank"
    memory = [f"{readable_size(sum(measured['rank_bytes'].values()))} {where}: {parts}; plus activations"]
    if measured["shards"] > 1:
        memory.append(f"{measured['shards']} shards of the weights; those of one block come on top while it computes")
    screen.fact("memory", *memory)


def _evaluations(job: Job) -> str:
    if not (sets := [*evaluation_sets(job.config.tree)]):
        return "never: data.eval is null"
    every_steps = job.config.evaluation.every_steps
    when = "after every epoch, and at the end" if every_steps is None else f"every {every_steps} steps, and at the end"
    return when if sets == ["data.eval"] else f"{when}: {', '.join(sets)}"


def _saves(job: Job, measured: Mapping[str, Any] | str) -> list[str]:
    """Return lines: when checkpoints are saved, and, where sizes are known, the disk space that they need."""
    settings = job.config.checkpoint
    when = ["after each evaluation"] if settings.every_evaluation and evaluation_sets(job.config.tree) else []
    when += [f"every {settings.every_minutes:g} minutes"] if settings.every_minutes is not None else []
    when += [f"every {settings.every_steps} steps"] if settings.every_steps is not None else []
    lines = [", ".join([*when, "at the end"])]
    if not isinstance(measured, str):
        counts = {"keep_last": settings.keep_last, "keep_best": settings.keep_best, "one that is written": 1}
        if period := settings.keep_every_steps:
            counts[f"keep_every_steps={period}"] = measured["steps"] // period
        total, size = sum(counts.values()), measured["checkpoint_bytes"]
        sum_of = " + ".join(f"{count} ({name})" for name, count in counts.items() if count)
        at_most = f"at most {sum_of} = {total} at a time, {readable_size(total * size)}"
        lines.append(f"{readable_size(size)} each, weights and the optimizer's state; {at_most}")
    return lines


def newest_like(config: RunConfig, runs: Path) -> tuple[Path, float] | None:
    """Return the newest run in a folder, or in its `sweeps`, with the same model, data and precision, and its newest seconds for a step."""
    files = [*runs.glob("*/metrics.jsonl"), *runs.glob("sweeps/*/*/metrics.jsonl")]
    with suppress(OSError):  # a run that is just removed
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for folder in [file.parent for file in files[:_RUNS_READ]]:
        step_ms = newest_record(RunFolder(folder)).get("step_ms")
        with suppress(ConfigError):  # a config of another version, say
            saved = saved_config(folder)
            if step_ms and all(saved.get(name) == getattr(config, name) for name in ("model", "data", "amp")):
                return folder, step_ms / 1000
    return None


def show_time(screen: Screen, job: Job, measured: Mapping[str, Any] | str) -> None:
    """Show how long the run takes, from the step time of an earlier one of this name, and whether its walltime is enough."""
    cluster, folder = job.config.cluster, job.run_folder.root
    limit_s = None if cluster.walltime is None else cluster.walltime - cluster.grace_s
    typed = value_at(job.config.tree, "cluster.walltime")
    ends = "" if limit_s is None else f"cluster.walltime={typed}: it saves and stops after {duration(limit_s)}"
    steps = measured["steps"] if isinstance(measured, Mapping) else job.config.trainer.max_steps
    past = newest_like(job.config, next((parent.parent for parent in folder.parents if parent.name == "sweeps"), folder.parent))
    if past is None:
        screen.fact("time", "not known: no earlier run of this name had this model, data and precision", *filter(None, [ends]))
        return
    past_folder, step_s = past
    lines = [f"{1000 * step_s:.4g} ms a step in {as_typed(past_folder)}, the newest run with this model, data and precision"]
    if steps is not None:
        steps = max(0, steps - max(job.run_folder.saved_steps(), default=0))
        seconds = steps * step_s
        lines = [f"about {duration(seconds)} for {steps:,} steps: {lines[0]}", "without start-up, evaluations and waiting for checkpoints"]
        if limit_s is not None:
            starts = math.ceil(seconds / limit_s)
            ends += f", which is {'enough' if starts <= 1 else f'too short: the run has to be started {starts} times'}"
    lines += [ends] if ends else []
    screen.fact("time", *lines)


def _safe(text: str) -> str:
    """Return text on one line, without secrets and control characters."""
    return printable(redact(text)).replace("\n", "\\n").replace("\t", "\\t")
