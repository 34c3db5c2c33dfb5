"""`ddp-train runs`: list, show, compare, tag and clean finished and running runs. Starts nothing."""

import json
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.filesize import decimal

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.clean import carry_out, removals
from ddp_train.archive.compare import compare
from ddp_train.archive.groups import distinct_words, grouped, remarks
from ddp_train.archive.index import Index
from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.cli.status import show_run
from ddp_train.errors import DONE, FAILED, ConfigError, one_line, plural, printable
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.progress import duration
from ddp_train.run_folder.result import Status
from ddp_train.system.files import write_json

USAGE = """ddp-train runs [FOLDER ...] [--where=SQL] [--sort=[-]KEY] [--group] [--limit=N] [--json]

  FOLDER         all runs below it, the newest first; outputs, if none is given. The folder of a sweep alone: the best job first, and
                 exit code 1 if a job has failed
  --where=SQL    only these: "status = 'failed' AND optimizer.lr > 0.001"; over the columns, keys of the configuration and metrics
  --sort=KEY     by one of these; best and last have the better run first; - before it reverses
  --group        one row for runs that differ by the seed alone: how many, mean, spread; and whether the best one is certain
  --limit=N      so many rows (50; 0: all)
  --json         one JSON object a line

ddp-train runs show RUN [--json]                    one run: how it ended, its numbers and curves, what it ran on
ddp-train runs compare RUN RUN ... [--json]         what differs: configuration, code, data, environment, results
ddp-train runs tag RUN NAME ... [--remove]          give a run tags, or take them away
ddp-train runs note RUN TEXT                        write a note to a run; "" removes it
ddp-train runs clean [FOLDER ...] --keep=RULE ...   remove all other runs, after saying which and asking

  --keep=RULE    best=N or last=N of each `name`; tagged; where=SQL; may be repeated
  --where=SQL    clean only these
  --checkpoints  remove their checkpoints, and keep the rest of them
  --yes          do not ask

A run that a process or an engine works on is never removed, and none into which a run that stays has a path (init_from, resume, after).
"""

_LIMIT = 50
_SHOWN = 40  # characters of a value
_WIDTH, _HEIGHT = 64, 8  # characters of a curve's frame
_PROBLEMS = 10  # lines


def runs(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train runs [show|compare|tag|note|clean] ...`."""
    if arguments and arguments[0] in _ACTIONS and not Path(arguments[0]).is_dir():
        return _ACTIONS[arguments[0]](arguments[1:])
    known = {"--where": "SQL", "--sort": "KEY", "--group": "", "--limit": "N", "--json": ""}
    options, folders = parse_words(arguments, USAGE, known, most=None, default="outputs")
    index, is_json, is_of_sweep = Index(*map(Path, folders)), "--json" in options, len(folders) == 1 and is_sweep(Path(folders[0]))
    limit = int(options.get("--limit", 0 if is_json or "--group" in options else _LIMIT))
    sort, is_grouped = options.get("--sort", "best" if is_of_sweep else ""), "--group" in options
    rows = index.rows(where=options.get("--where", ""), sort=sort, limit=0 if is_grouped else limit)
    if is_grouped:
        _print_groups(rows, is_json=is_json, limit=limit)
    elif is_json:
        _print(map(json.dumps, rows))
    else:
        _print_rows(
            rows, f"{len(rows):,} of {plural(len(index), 'run')}{', all with --limit=0' if len(rows) == limit < len(index) else ''}"
        )
    return FAILED if is_of_sweep and index.rows(where="status = 'failed'", limit=1) else DONE


def _print_rows(rows: Sequence[dict[str, Any]], count: str) -> None:
    table = [["run", "status", "age", "metric", "best", "last", "steps", "hosts", "size", "tags", "typed"]]
    for row, typed in zip(rows, distinct_words(rows, lambda key: key != "name"), strict=True):
        facts = [row["folder"], row["status"] + (" !" if row["problem"] else ""), _age(row["age_days"]), row["metric"] or ""]
        numbers = [number(row[name]) for name in ("best", "last", "steps", "hosts")]
        again = f"reproduces {row['reproduces']}" if row["reproduces"] else typed
        table.append([*facts, *numbers, decimal(row["size"]), row["tags"] or "", again])
    _print(aligned(table, right=(2, *range(4, 9)), width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
    failed = [row for row in rows if row["error"] and row["status"] == Status.FAILED]
    _print(f"{row['folder']}: {one_line(row['error'], 200)}" for row in failed[:_PROBLEMS])
    damaged = [row for row in rows if row["problem"]]
    _print(f"! {row['folder']}: {one_line(row['problem'], 200)}" for row in damaged[:_PROBLEMS])
    print(f"{count}{f'; {len(damaged)} marked' if damaged else ''}")


def _print_groups(rows: Sequence[dict[str, Any]], *, is_json: bool, limit: int) -> None:
    groups = grouped(rows)
    shown = groups[: limit or None]
    if is_json:
        _print(json.dumps(vars(group)) for group in shown)
        return
    table = [["runs", "mean", "± 95 %", "deviation", "metric", "best run", "settings"]]
    for group in shown:
        table.append([*map(number, (group.n, group.mean, group.half_width, group.deviation)), group.metric, group.folders[0], group.label])
    count = f"{len(shown)} of " if len(shown) < len(groups) else ""
    _print([*aligned(table, right=range(4)), f"{count}{plural(len(groups), 'group')} of completed runs", *remarks(rows, groups)])


def _show(arguments: list[str]) -> int:
    options, (path,) = parse_words(arguments, "ddp-train runs show RUN", {"--json": ""})
    run = _run(path)
    environment = run.environment
    if "--json" in options:
        names = ("status", "step", "headline", "last", "best", "config", "environment", "events", "notes", "problems")
        print(json.dumps({"run": str(run.root), **{name: getattr(run, name) for name in names}}, default=str))
        return DONE
    facts = {
        "began": f"{_age((time.time() - run.started) / 86400)} ago" if run.started is not None else "",
        "command": environment.get("command") if not run.reproduces else f"ddp-train reproduce {run.reproduces}",
        "code": run.commit,
        "ran on": f"{plural(environment.get('world_size', 0), 'rank')} on {', '.join(environment.get('hosts', []))}" if environment else "",
        "sweep": run.sweep,
        "saved": ", ".join(f"step {entry.step}" for entry in run.checkpoints),
        "tags": " ".join(run.notes.get("tags", [])),
        "note": run.notes.get("note"),
    }
    if run.problems:
        _print([f"{run.folder.as_typed()}: {run.status}", *(f"! {text}" for text in run.problems)])
    else:
        show_run(run.folder, run.folder.as_typed())
    _print(f"  {name:<8} {value}" for name, value in facts.items() if value)
    rows = [["metric", "last", "best", "at step"]]
    for metric, last in run.last.items():
        best = run.best.get(metric) or {}
        rows.append([metric, number(last), number(best.get("value")), number(best.get("step"))])
    _print([*aligned(rows, right=(1, 2, 3)), *_plots({"A": run})])
    return DONE


def _compare(arguments: list[str]) -> int:
    options, paths = parse_words(arguments, "ddp-train runs compare RUN RUN ...", {"--json": ""}, most=None)
    if len(paths) < 2:
        raise ConfigError(happened="one run was given", expected="two or more", fix=f"ddp-train runs compare {paths[0]} RUN")
    runs = {chr(ord("A") + index): _run(path) for index, path in enumerate(paths)}
    found = compare([*runs.values()])
    if "--json" in options:
        print(json.dumps(asdict(found), default=str))
        return DONE
    for letter, run in runs.items():
        _print([f"{letter}  {run.folder.as_typed()}  {run.status}, {run.step or 0} steps", *(f"!  {text}" for text in run.problems)])
    for subject, differences in found.differences.items():
        rows = [[subject, *runs]]
        for difference in differences:
            told = zip(map(_text, difference.values), difference.origins, strict=True)
            rows.append([f"  {difference.name}", *(f"{value} ({origin})" if origin else value for value, origin in told)])
        _print(["", *(aligned(rows) if differences else [f"{subject}: the same, as far as it was recorded"])])
    columns = [f"{letter} {kind}" for letter in runs for kind in ("last", "best")]
    rows = [["results", *columns, *(f"{letter} - A" for letter in [*runs][1:])]]
    for metric, results in found.results.items():
        if metric.startswith("eval/") or metric in ("train/loss", runs["A"].headline["metric"]):
            values = [number(result[kind]) for result in results for kind in ("last", "best")]
            rows.append([f"  {metric}", *values, *(number(result["difference"], "+") for result in results[1:])])
    _print(["", *aligned(rows, right=range(1, len(rows[0]))), *_plots(runs)])
    return DONE


def _plots(runs: Mapping[str, ArchivedRun]) -> list[str]:
    """Return the curves of the first run's headline metric and of the loss, each by the letter of its run."""
    lines = list[str]()
    for metric in dict.fromkeys((runs["A"].headline["metric"], "train/loss")):
        if drawn := plot({letter: run.curve(metric) for letter, run in runs.items()}):
            lines += ["", metric, *drawn]
    return lines


def _tag(arguments: list[str]) -> int:
    options, (path, *tags) = parse_words(arguments, "ddp-train runs tag RUN NAME ... [--remove]", {"--remove": ""}, most=None)
    run = _run(path)
    if not tags or any(not tag.isprintable() or " " in tag or not tag for tag in tags):
        raise ConfigError(happened="no tag was given, or one with a space", expected="ddp-train runs tag RUN NAME ...")
    before = run.notes.get("tags", [])
    tags = [tag for tag in before if tag not in tags] if "--remove" in options else [*dict.fromkeys([*before, *tags])]
    _annotate(run, tags=tags)
    print(f"{run.folder.as_typed()}: {' '.join(tags) or 'no tags'}")
    return DONE


def _note(arguments: list[str]) -> int:
    _, (path, *text) = parse_words(arguments, 'ddp-train runs note RUN "TEXT"', {}, most=2)
    if not text:
        raise ConfigError(happened="no text was given", expected='ddp-train runs note RUN "TEXT"')
    _annotate(_run(path), note=text[0] or None)
    return DONE


def _annotate(run: ArchivedRun, **notes: Any) -> None:
    if damaged := [problem for problem in run.problems if problem.startswith(f"{run.folder.notes.name} ")]:
        raise ConfigError(happened=f"{run.folder.as_typed()}/{damaged[0]}", expected="tags and a note", fix="mend it, or move it away")
    write_json(run.folder.notes, {**run.notes, **notes})


def _clean(arguments: list[str]) -> int:
    known = {"--keep": "RULE ...", "--where": "SQL", "--checkpoints": "", "--yes": ""}
    options, folders = parse_words(arguments, USAGE, known, most=None, default="outputs")
    rules, what, failed = options.get("--keep", "").splitlines(), "checkpoints of " if "--checkpoints" in options else "", list[str]()
    if not rules and "--where" not in options:
        raise ConfigError(happened="which runs stay?", expected="--keep=RULE or --where=SQL", fix="--keep=best=2 --keep=tagged")
    index = Index(*map(Path, folders))
    found = removals(index, where=options.get("--where", ""), rules=rules, only_checkpoints=bool(what))
    for removal in found:
        used = f"  stays: {removal.used_by} uses it" if removal.used_by else ""
        _print([f"{decimal(removal.bytes):>9}  {removal.path}{used}"])
    chosen = [removal for removal in found if not removal.used_by]
    count = f"{what}{plural(len(chosen), 'run')}"
    print(f"{count} can be removed, {decimal(sum(removal.bytes for removal in chosen))}")
    if chosen and "--yes" not in options and not sys.stdin.isatty():
        raise ConfigError(happened="nothing was removed: there is no terminal to ask on", expected="a terminal, or --yes")
    if chosen and ("--yes" in options or input(f"remove {count}? [y/N] ").strip().lower() in ("y", "yes")):
        failed = carry_out(chosen)
    print("".join(printable(f"{line}\n") for line in failed), end="", file=sys.stderr)
    return FAILED if failed else DONE


def _run(path: str) -> ArchivedRun:
    return ArchivedRun(run_of(Path(path), key="RUN"))


def _print(lines: Any) -> None:
    for line in lines:
        print(printable(line))


def _age(days: float | None) -> str:
    return "" if days is None else duration(days * 86400) if days < 2 else f"{days:.0f} d"


def _text(value: Any) -> str:
    return "-" if value is None else one_line(number(value), _SHOWN)


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int = 0) -> list[str]:
    """Return rows as lines with aligned columns, those of numbers to the `right`; lines are cut after `width` cells, if that is given."""
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    sizes = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        spaces = [" " * (size - cell_len(cell)) for size, cell in zip(sizes, row, strict=True)]
        padded = [space + cell if i in right else cell + space for i, (cell, space) in enumerate(zip(row, spaces, strict=True))]
        line = "  ".join(padded).rstrip()
        lines.append(line if not width or cell_len(line) <= width else f"{line[: width - 1]}…")
    return lines


def number(value: Any, sign: str = "") -> str:
    """Write a value for people: a float with four digits, nothing for None."""
    return "" if value is None else f"{value:{sign}.4g}" if isinstance(value, float) else str(value)


def plot(curves: Mapping[str, Sequence[tuple[int, float | None]]]) -> list[str]:
    """Draw values by step into one frame of text lines, each curve by its letter; None is left out."""
    points = {letter: [(x, y) for x, y in curve if y is not None] for letter, curve in curves.items()}
    xs, ys = ([point[axis] for curve in points.values() for point in curve] for axis in (0, 1))
    if not xs:
        return []
    across, up = (_WIDTH - 1) / (max(xs) - min(xs) or 1), (_HEIGHT - 1) / (max(ys) - min(ys) or 1)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for letter, curve in points.items():
        places = [((x - min(xs)) * across, (max(ys) - y) * up) for x, y in curve]
        for (x, y), (next_x, next_y) in pairwise([*places, places[-1]] if places else []):
            steps = max(1, round(max(abs(next_x - x), abs(next_y - y))))
            for i in range(steps):
                rows[round(y + (next_y - y) * i / steps)][round(x + (next_x - x) * i / steps)] = letter
    labels = {0: f"{max(ys):.4g}", _HEIGHT - 1: f"{min(ys):.4g}"}
    lines = [f"{labels.get(i, ''):>9} │{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    return [*lines, f"{'':>9} └{'─' * _WIDTH}", f"{'':>11}{min(xs):<{_WIDTH // 2}}{f'step {max(xs)}':>{_WIDTH // 2}}"]


_ACTIONS = {"show": _show, "compare": _compare, "tag": _tag, "note": _note, "clean": _clean}
