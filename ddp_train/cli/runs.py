"""`ddp-train runs`: list, show, compare, tag and clean what runs have left. Starts nothing."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.clean import carry_out, kept, removals
from ddp_train.archive.compare import compare
from ddp_train.archive.groups import conclusion, grouped, left_out
from ddp_train.archive.index import Index, merged
from ddp_train.cli.drawing import aligned, number, plot
from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.cli.status import may_go_on, show_run, show_sweep
from ddp_train.errors import DONE, FAILED, ConfigError, one_line, plural, printable
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.progress import duration
from ddp_train.system.files import write_json

USAGE = """ddp-train runs [FOLDER ...] [--where=SQL] [--sort=[-]KEY] [--group] [--limit=N] [--json]

  FOLDER         all runs below it, the newest first; outputs, if none is given. The folder of a sweep alone: its table, the best job first;
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
  --used-too     also those that a run which stays points to (init_from, resume, after)
  --yes          do not ask

A run that a process or an engine works on is never removed.
"""

_LIMIT = 50
_SHOWN = 40  # characters of a value
_PROBLEMS = 10  # lines
_PROGRESS_EVERY = 200  # runs
_ELSEWHERE = ("name=", "cluster", "metrics", "hydra")  # the beginning of overrides that are no setting of the training


def runs(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train runs [show|compare|tag|note|clean] ...`."""
    if arguments and arguments[0] in _ACTIONS and not Path(arguments[0]).is_dir():
        return _ACTIONS[arguments[0]](arguments[1:])
    folders = [word for word in arguments if word != "--json"]
    if len(folders) == 1 and is_sweep(Path(folders[0])):
        return show_sweep(arguments, runner)
    known = {"--where": "SQL", "--sort": "KEY", "--group": "", "--limit": "N", "--json": ""}
    options, folders = parse_words(arguments, USAGE, known, most=None, default="outputs")
    where, sort, is_json = options.get("--where", ""), options.get("--sort", ""), "--json" in options
    limit = int(options.get("--limit", 0 if is_json or "--group" in options else _LIMIT))
    found = merged([_index(folder) for folder in folders], where=where, sort=sort)
    all_rows = [{**row, "folder": str(index.typed / row["folder"])} for index, row in found]
    rows = all_rows[: limit or None]
    if "--group" in options:
        _print_groups(rows, is_json=is_json)
    elif is_json:
        _print(json.dumps({**row, "values": json.loads(row["values"])}) for row in rows)
    else:
        _print_rows(rows, len(all_rows))
    return DONE


def _index(folder: str) -> Index:
    """Return the index of a folder; who waits at a terminal sees how far it is."""

    def on_read(done: int, all: int) -> None:
        if sys.stderr.isatty() and all > _PROGRESS_EVERY and (done % _PROGRESS_EVERY == 0 or done == all):
            print(f"\rreading {done:,} of {all:,} runs" + ("\r\x1b[K" if done == all else ""), end="", file=sys.stderr, flush=True)

    return Index(Path(folder), on_read)


def _print_rows(rows: Sequence[dict[str, Any]], num_all: int) -> None:
    typed = [[word for word in shlex.split(row["typed"] or "") if not word.startswith(_ELSEWHERE)] for row in rows]
    common = set(typed[0]).intersection(*typed[1:]) if len(rows) > 1 else set()
    columns = ["run", "status", "age", "metric", "best", "last", "steps", "hosts", "size", "tags", "typed"]
    table = [columns]
    for row, words in zip(rows, typed, strict=True):
        facts = [row["folder"], row["status"] + (" !" if row["problem"] else ""), _age(row["age_days"]), row["metric"] or ""]
        numbers = [number(row[name]) for name in ("best", "last", "steps", "hosts")]
        table.append([*facts, *numbers, decimal(row["size"]), row["tags"] or "", " ".join(word for word in words if word not in common)])
    _print(aligned(table, right=(2, *range(4, 9)), width=shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
    damaged = [row for row in rows if row["problem"]]
    _print(f"! {row['folder']}: {one_line(row['problem'], 200)}" for row in damaged[:_PROBLEMS])
    more = f", {num_all - len(rows):,} more with --limit=0" if num_all > len(rows) else ""
    print(f"{plural(num_all, 'run')}{f', {len(damaged)} marked' if damaged else ''}{more}")


def _print_groups(rows: Sequence[dict[str, Any]], *, is_json: bool) -> None:
    groups = grouped(rows)
    if is_json:
        _print(json.dumps(group.as_dict()) for group in groups)
        return
    table = [["runs", "mean", "± 95 %", "deviation", "metric", "best run", "settings"]]
    for group in groups:
        spread, settings = group.spread, group.typed or " ".join(f"{name}={_text(value)}" for name, value in group.settings.items())
        table.append([*map(number, (spread.n, spread.mean, spread.half_width, spread.deviation)), group.metric, group.folders[0], settings])
    said = filter(None, (left_out(rows, groups), conclusion(groups)))
    _print([*aligned(table, right=range(4)), f"{plural(len(groups), 'group')} of completed runs", *said])


def _show(arguments: list[str]) -> int:
    options, (path,) = parse_words(arguments, USAGE, {"--json": ""})
    run = _run(path)
    environment, git = run.environment, run.environment.get("git") or {}
    if "--json" in options:
        names = ("status", "step", "headline", "last", "best", "config", "environment", "events", "notes", "problems")
        print(json.dumps({"run": str(run.root), **{name: getattr(run, name) for name in names}}, default=str))
        return DONE
    took = f", took {duration(run.result.seconds)}" if run.result is not None and run.result.seconds is not None else ""
    facts = {
        "began": f"{_age((time.time() - run.started) / 86400)} ago{took}" if run.started is not None else "",
        "command": environment.get("command"),
        "code": f"{git['commit']}{', with changes: code.diff' if git.get('dirty') else ''}" if git.get("commit") else "",
        "ran on": f"{plural(environment.get('world_size', 0), 'rank')} on {', '.join(environment.get('hosts', []))}" if environment else "",
        "sweep": run.sweep,
        "saved": ", ".join(f"step {entry.step}" for entry in run.checkpoints),
        "events": f"{plural(len(run.events), 'event')}: events.jsonl" if run.events else "",
        "tags": " ".join(run.notes.get("tags", [])),
        "note": run.notes.get("note"),
    }
    if run.problems:
        _print([f"{run.folder.as_typed()}: {run.status}", *(f"! {text}" for text in run.problems)])
    else:
        show_run(run.folder, run.folder.as_typed())
    _print(f"  {name:<8} {value}" for name, value in facts.items() if value)
    best = {name: run.best.get(name) or {} for name in run.last}
    metrics = [[name, number(last), number(best[name].get("value")), number(best[name].get("step"))] for name, last in run.last.items()]
    _print([*aligned([["metric", "last", "best", "at step"], *metrics], right=(1, 2, 3)), *_plots([run])])
    return DONE


def _compare(arguments: list[str]) -> int:
    options, paths = parse_words(arguments, USAGE, {"--json": ""}, most=None)
    if len(paths) < 2:
        raise ConfigError(happened="one run was given", expected="two or more", fix=f"ddp-train runs compare {paths[0]} RUN")
    found = compare([_run(path) for path in paths])
    if "--json" in options:
        print(json.dumps(found.as_dict(), default=str))
        return DONE
    letters = _letters(found.runs)
    named = zip(letters, found.runs, strict=True)
    _print(f"{letter}  {run.folder.as_typed()}  {run.status}, {run.step or 0} steps" for letter, run in named)
    _print(f"!  {remark}" for remark in found.remarks)
    for title, differences in found.differences.items():
        rows = [[title, *letters]]
        for difference in differences:
            told = zip(map(_text, difference.values), difference.origins, strict=True)
            rows.append([f"  {difference.name}", *(f"{value} ({origin})" if origin else value for value, origin in told)])
        _print(["", *(aligned(rows) if differences else [f"{title}: the same, as far as it was recorded"])])
    columns = [f"{letter} {kind}" for letter in letters for kind in ("last", "best")]
    rows = [["results", *columns, *(f"{letter} - A" for letter in letters[1:])]]
    for name, results in found.results.items():
        if name.startswith("eval/") or name in ("train/loss", found.runs[0].headline["metric"]):
            values = [number(result[kind]) for result in results for kind in ("last", "best")]
            rows.append([f"  {name}", *values, *(number(result["difference"], "+") for result in results[1:])])
    _print(["", *aligned(rows, right=range(1, len(rows[0]))), *_plots(found.runs)])
    return DONE


def _plots(found: Sequence[ArchivedRun]) -> list[str]:
    """Return the curves of the headline metric and of the loss."""
    lines = list[str]()
    for metric in dict.fromkeys((found[0].headline["metric"], "train/loss")):
        if drawn := plot({letter: run.curve(metric) for letter, run in zip(_letters(found), found, strict=True)}):
            lines += ["", metric, *drawn]
    return lines


def _tag(arguments: list[str]) -> int:
    options, (path, *tags) = parse_words(arguments, USAGE, {"--remove": ""}, most=None)
    run = _run_to_note(path)
    if not tags or any(not tag.isprintable() or " " in tag or not tag for tag in tags):
        raise ConfigError(happened="no tag was given, or one with a space", expected="ddp-train runs tag RUN NAME ...")
    before = run.notes.get("tags", [])
    tags = [tag for tag in before if tag not in tags] if "--remove" in options else [*dict.fromkeys([*before, *tags])]
    write_json(run.root / "notes.json", {**run.notes, "tags": tags})
    print(f"{run.folder.as_typed()}: {' '.join(tags) or 'no tags'}")
    return DONE


def _note(arguments: list[str]) -> int:
    _, (path, *text) = parse_words(arguments, USAGE, {}, most=2)
    run = _run_to_note(path)
    if not text:
        raise ConfigError(happened="no text was given", expected='ddp-train runs note RUN "TEXT"')
    write_json(run.root / "notes.json", {**run.notes, "note": text[0] or None})
    return DONE


def _clean(arguments: list[str]) -> int:
    known = {"--keep": "RULE ...", "--where": "SQL", "--checkpoints": "", "--used-too": "", "--yes": ""}
    options, folders = parse_words(arguments, USAGE, known, most=None, default="outputs")
    rules = options.get("--keep", "").splitlines()
    if not rules and "--where" not in options:
        raise ConfigError(happened="which runs stay?", expected="--keep=RULE or --where=SQL", fix="--keep=best=2 --keep=tagged")
    what, failed = "the checkpoints of " if "--checkpoints" in options else "", list[str]()
    indices = [_index(folder) for folder in folders]
    for folder, index in zip(folders, indices, strict=True):
        rows, keep = index.rows(where=options.get("--where", "")), kept(index, rules)
        found = removals(indices, index, rows, keep, only_checkpoints=bool(what), may_go_on=may_go_on)
        chosen = [removal for removal in found if not removal.used_by or "--used-too" in options]
        for removal in found:
            used = f"  {'' if removal in chosen else 'stays: '}{removal.used_by[0]} uses it" if removal.used_by else ""
            _print([f"{decimal(removal.bytes):>9}  {removal.path.relative_to(index.root)}{used}"])
        count, size = plural(len(chosen), "run"), decimal(sum(removal.bytes for removal in chosen))
        print(f"{folder}: {what}{count} can be removed, {size}; {len(index.rows()) - len(chosen):,} stay as they are")
        if chosen and ("--yes" in options or _agrees(f"remove {what}{count}?")):
            failed += carry_out(chosen, may_go_on=may_go_on)
    print("".join(printable(f"{line}\n") for line in failed), end="", file=sys.stderr)
    return FAILED if failed else DONE


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(happened="nothing was removed: there is no terminal to ask on", fix="the same command with --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _run(path: str) -> ArchivedRun:
    return ArchivedRun(run_of(Path(path), key="RUN"))


def _run_to_note(path: str) -> ArchivedRun:
    run = _run(path)
    if damaged := [problem for problem in run.problems if problem.startswith("notes.json ")]:
        raise ConfigError(happened=f"{run.folder.as_typed()}/{damaged[0]}", expected="tags and a note", fix="mend it, or move it away")
    return run


def _print(lines: Any) -> None:
    for line in lines:
        print(printable(line))


def _letters(found: Sequence[ArchivedRun]) -> list[str]:
    return [chr(ord("A") + index) for index in range(len(found))]


def _age(days: float | None) -> str:
    return "" if days is None else duration(days * 86400) if days < 2 else f"{days:.0f} d"


def _text(value: Any) -> str:
    return "-" if value is None else one_line(number(value), _SHOWN)


_ACTIONS = {"show": _show, "compare": _compare, "tag": _tag, "note": _note, "clean": _clean}
