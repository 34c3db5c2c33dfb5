"""`ddp-train runs`: list, show, compare, tag and clean finished and running runs. Starts nothing."""

import json
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise, takewhile
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
from ddp_train.cli.status import details, state_of
from ddp_train.config.spelling import text_of
from ddp_train.errors import DONE, FAILED, ConfigError, one_line, plural, printable
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.failure import load_report
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

ddp-train runs show RUN [--json]               one run: how it ended, its numbers and curves, what it ran on
ddp-train runs compare RUN RUN ... [--json]    what differs from the first: configuration, code, data, environment, results
ddp-train runs tag RUN NAME ... [--remove]     give a run tags, or take them away
ddp-train runs note RUN TEXT                   write a note to a run; "" removes it
ddp-train runs clean [FOLDER ...] --keep=RULE ... [--where=SQL] [--checkpoints] [--yes] [--json]

  FOLDER         remove runs below it; outputs, if none is given. All are listed first, with why a run stays, and you are asked
  --keep=RULE    keep best=N or last=N of each `name`; tagged; where=SQL; may be repeated
  --where=SQL    clean only these
  --checkpoints  remove their checkpoints, and keep the rest of them
  --yes          do not ask; without it nothing is removed where there is no terminal to ask on
  --json         one JSON object a line, and no question

A run that a process or an engine works on is never removed, and none into which a run that stays has a path (init_from, resume, after).
"""

_LIMIT = 50
_COLUMNS = ("run", "status", "age", "time", "metric", "best", "last", "steps", "hosts", "size", "tags", "typed")
_OF_WORDS = ("run", "status", "metric", "tags", "typed")
_RESULTS = ("train/loss", "train/samples_per_s", "train/tokens_per_s", "seconds")  # with those of evaluations
_SHOWN, _SAME = 80, 10  # characters of a value, and of the beginning that it has in common with the others
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
        more = ", all with --limit=0" if len(rows) == limit < len(index) else ""
        _print_rows(rows, f"{len(rows):,} of {plural(len(index), 'run')}{more}")
    return FAILED if is_of_sweep and index.rows(where="status = 'failed'", limit=1) else DONE


def _print_rows(rows: Sequence[dict[str, Any]], count: str) -> None:
    columns = [name for name in _COLUMNS if name not in ("hosts", "tags") or any(row[name] not in (None, "", 1) for row in rows)]
    table = [columns]
    for row, typed in zip(rows, distinct_words(rows, lambda key: key != "name"), strict=True):
        texts = {name: number(row[name]) for name in columns if name in row}
        texts |= {"run": row["folder"], "status": row["status"] + (" !" if row["problem"] else ""), "age": _age(row["age_days"])}
        texts |= {"time": _age(row["seconds"] and row["seconds"] / 86400), "size": decimal(row["size"])}
        texts["typed"] = f"reproduces {row['reproduces']}" if row["reproduces"] else typed
        table.append([texts[name] for name in columns])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    _print(aligned(table, right=[i for i, name in enumerate(columns) if name not in _OF_WORDS], width=width))
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
    environment, status, name = run.environment, run.status, run.folder.as_typed()
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
    state = f"failed; `{run.folder.resume_command()}` continues it {run.folder.resume_point_text()}"
    state = state if status == Status.FAILED else status if run.problems else state_of(run.folder)
    _print([f"{name}: {state}", *(f"! {text}" for text in run.problems)])
    _print(f"  {line}" for line in (() if run.problems else details(run.folder)))
    _print(f"  {title:<8} {value}" for title, value in facts.items() if value)
    if status == Status.FAILED and run.result is not None:
        report = load_report(run.folder.failure)
        _print([f"\n{report.screen(run.folder).strip() if report is not None else run.result.error}"])
    rows = [["metric", "last", "best", "at step"]]
    for metric, last in run.last.items():
        best = run.best.get(metric) or {}
        rows.append([metric, number(last), number(best.get("value")), number(best.get("step"))])
    _print([*(["", *aligned(rows, right=(1, 2, 3))] if run.last else []), *_plots({"A": run})])
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
            told = zip(_texts(difference.values), difference.origins, strict=True)
            rows.append([f"  {difference.name}", *(f"{value} ({origin})" if origin else value for value, origin in told)])
        _print(["", *(aligned(rows) if differences else [f"{subject}: the same, as far as it was recorded"])])
    columns = [f"{letter} {kind}" for letter in runs for kind in ("last", "best")]
    rows = [["results", *columns, *(f"{letter} - A" for letter in [*runs][1:])]]
    for metric, results in found.results.items():
        if metric.startswith("eval/") or metric in (*_RESULTS, runs["A"].headline["metric"]):
            values = [number(result[kind]) for result in results for kind in ("last", "best")]
            rows.append([f"  {metric}", *values, *(number(result["difference"], "+") for result in results[1:])])
    _print(["", *aligned(rows, right=range(1, len(rows[0]))), *_plots(runs)])
    return DONE


def _plots(runs: Mapping[str, ArchivedRun]) -> list[str]:
    """Return the curves of the first run's headline metric and of the loss, each by the letter of its run, equal ones by the first."""
    lines = list[str]()
    for metric in dict.fromkeys((runs["A"].headline["metric"], "train/loss")):
        curves = {letter: run.curve(metric) for letter, run in runs.items()}
        first = {letter: next(other for other in curves if curves[other] == curve) for letter, curve in curves.items() if curve}
        if drawn := plot({letter: curves[letter] for letter in first.values()}):
            lines += ["", metric, *drawn]
            lines += [f"{'':>11}{other} and {letter} are the same" for letter, other in first.items() if letter != other]
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
    known = {"--keep": "RULE ...", "--where": "SQL", "--checkpoints": "", "--yes": "", "--json": ""}
    options, folders = parse_words(arguments, USAGE, known, most=None, default="outputs")
    rules, what, failed = options.get("--keep", "").splitlines(), "checkpoints of " if "--checkpoints" in options else "", list[str]()
    if not rules and "--where" not in options:
        raise ConfigError(happened="which runs stay?", expected="--keep=RULE or --where=SQL", fix="--keep=best=2 --keep=tagged")
    index = Index(*map(Path, folders))
    found = removals(index, where=options.get("--where", ""), rules=rules, only_checkpoints=bool(what))
    chosen = [removal for removal in found if not removal.stays]
    count, asks = f"{what}{plural(len(chosen), 'run')}", "--json" not in options
    if asks:
        _print(f"{decimal(each.bytes):>9}  {each.path}{each.stays and f'  stays: {each.stays}'}" for each in found)
        print(f"{count} can be removed, {decimal(sum(removal.bytes for removal in chosen))}")
    else:
        _print(json.dumps(vars(removal), default=str) for removal in found)
    if "--yes" in options or (asks and chosen and sys.stdin.isatty() and input(f"remove {count}? [y/N] ").strip().lower() in ("y", "yes")):
        failed = carry_out(chosen)
    elif asks and chosen:
        print(f"nothing was removed; --yes removes {'them' if len(chosen) > 1 else 'it'}")
    print("".join(printable(f"{line}\n") for line in failed), end="", file=sys.stderr)
    return FAILED if failed else DONE


def _run(path: str) -> ArchivedRun:
    return ArchivedRun(run_of(Path(path), key="RUN"))


def _print(lines: Any) -> None:
    for line in lines:
        print(printable(line))


def _age(days: float | None) -> str:
    return "" if days is None else duration(days * 86400) if days < 2 else f"{days:.0f} d"


def _texts(values: Sequence[Any]) -> list[str]:
    """Write the values of a row, lists as they are typed, and long values without the beginning that they have in common."""
    texts = [text_of(value) if isinstance(value, (bool, list, dict)) else " ".join(number(value).split()) or "-" for value in values]
    different = {*texts} - {"-"}
    common = takewhile(lambda characters: len({*characters}) == 1, zip(*different, strict=False))
    same = len([*common]) - _SAME if len(different) > 1 and max(map(len, different)) > _SHOWN else 0
    return [one_line(f"...{text[same:]}" if same > 0 and text != "-" else text, _SHOWN) for text in texts]


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
    form = f"{sign},.0f" if isinstance(value, float) and 1e4 <= abs(value) < 1e9 else f"{sign}.4g"
    return "" if value is None else f"{value:{form}}" if isinstance(value, float) else str(value)


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
