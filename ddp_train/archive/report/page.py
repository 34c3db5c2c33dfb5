"""The page of one or several runs: one HTML file with all that it shows, and the program that shows it."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.report.curves import curves_of, marks_of
from ddp_train.archive.report.evaluation import evaluation_of
from ddp_train.archive.report.importance import importance_of
from ddp_train.archive.report.packed import Numbers, packed
from ddp_train.archive.report.samples import samples_of
from ddp_train.archive.report.time_split import time_split_of
from ddp_train.config.tree import changes_results, dotted_items
from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.sweep import REPEATS, Sweep

_HERE = Path(__file__).parent
_POINTS, _MAX_POINTS = 20_000, 600_000  # of the curves of one run, and of all: 300 kB and 3 MB
_CELLS, _MAX_CELLS = 8_000, 60_000  # of the time split
_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = 60_000, 400_000
_SERIAL_BYTES = 30_000_000  # of metrics.jsonl, that one process reads
_MAX_ANSWERS = 8  # runs whose answers to each sample are there
_MAX_KEYS = 12  # in which runs differ, as columns


@dataclass(kw_only=True)
class Shown:
    """A run on a page: its name there, and its values of the keys in which the runs differ."""

    run: ArchivedRun
    name: str
    values: dict[str, Any]
    group: int = 0  # runs of one have the same settings: chance alone is between them


def collect(folders: Sequence[Path]) -> list[Shown]:
    """Return the runs of some folders of runs and sweeps. Raises ConfigError: a sweep that cannot be read."""
    sweeps = [(folder, Sweep.load(folder.absolute()) if is_sweep(folder) else None) for folder in folders]
    shown = []
    for folder, sweep in sweeps:
        if sweep is None:
            shown.append(Shown(run=ArchivedRun(folder), name=RunFolder(folder).as_typed(), values={}))
            continue
        for job in sweep.jobs:
            values = {key: _plain(sweep.value(job, key)) for key in sweep.swept()}
            shown.append(Shown(run=ArchivedRun(sweep.run_folder(job).root), name=_named(str(job.number), values), values=values))
    trees, groups = [_flat(each.run.config) for each in shown], dict[str, int]()
    for each, tree in zip(shown, trees, strict=True):
        keys = tree or each.values  # a job that waits has no configuration yet
        settings = {key: value for key, value in keys.items() if key.rpartition(".")[2] not in REPEATS and changes_results(key)}
        each.group = groups.setdefault(json.dumps(settings, sort_keys=True, default=str), len(groups))
    if len(sweeps) > 1 or not (sweeps and sweeps[0][1]):
        every = dict.fromkeys(key for tree in trees for key in tree if key != "name")
        differing = [key for key in every if any(tree.get(key) != trees[0].get(key) for tree in trees)][:_MAX_KEYS]
        roots = [each.run.root.absolute() for each in shown]
        parent = os.path.commonpath([root.parent for root in roots]) if roots else ""
        for each, tree, root in zip(shown, trees, roots, strict=True):
            each.values = {key: tree.get(key) for key in differing}
            each.name = _named(str(root.relative_to(parent)), each.values) if len(roots) > 1 else each.name
    return shown


def _named(name: str, values: Mapping[str, Any]) -> str:
    """Return the name of a run; that of a sweep's job, a number, with some of its values."""
    texts = [
        f"{key.removesuffix('._target_').rpartition('.')[2]}={str(value).rpartition('.')[2] if isinstance(value, str) else value}"
        for key, value in values.items()
    ]
    return f"{name} {','.join(texts[:4])}".strip() if name.isdigit() else name


def page(shown: Sequence[Shown], *, title: str, reload_s: int = 0) -> str:
    """Return a page of runs as HTML. `reload_s`: the page loads itself again after so many seconds; 0: it is final."""
    numbers, targets = Numbers(), dict[int, Any]()
    many = len(shown)
    headline = next((each.run.headline for each in shown if each.run.result is not None), shown[0].run.headline)
    curves = _curves([each.run.root for each in shown], points=min(_POINTS, _MAX_POINTS // many))
    runs, first = [], dict[str, dict[str, Any]]()
    for each, read in zip(shown, curves, strict=True):
        for curve in read["curves"].values():
            curve |= {name: numbers.add(curve[name]) for name in ("y", "rows") if name in curve}
        trees = {"config": _flat(each.run.config), "environment": _flat(each.run.environment)}
        first = first or trees
        differing = {name: _difference(tree, first[name]) for name, tree in trees.items()}
        runs.append(_run(each, numbers, targets, many=many) | read | differing)
    metric = [_finite(read["last"].get(headline["metric"])) for read in curves]
    content = {
        "title": title,
        "made": time.time(),
        "reload": reload_s,
        "headline": headline,
        "keys": list(dict.fromkeys(key for each in shown for key in each.values)),
        "first": first,
        "runs": runs,
        "targets": targets,
        "importance": importance_of([each.values for each in shown], metric, goal=headline["goal"]) if many > 1 else None,
    }
    content = json.loads(json.dumps(content, default=str), parse_constant=str)  # JSON, and a browser, know no NaN
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (_HERE / "uplot/uPlot.min.css").read_text() + (_HERE / "page.css").read_text(),
        "LIBRARY": f"/* uPlot\n{(_HERE / 'uplot/LICENSE').read_text()}*/\n{(_HERE / 'uplot/uPlot.iife.min.js').read_text()}",
        "PROGRAM": (_HERE / "page.js").read_text(),
        "CONTENT": packed(json.dumps(content, separators=(",", ":")).encode()),
        "NUMBERS": numbers.text(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], (_HERE / "page.html").read_text())


def _curves(roots: Sequence[Path], *, points: int) -> list[dict[str, Any]]:
    read = partial(curves_of, points=points)
    size = sum(path.stat().st_size for root in roots if (path := RunFolder(root).metrics).exists())
    if size < _SERIAL_BYTES:
        return list(map(read, roots))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        return list(pool.map(read, roots))


def _run(each: Shown, numbers: Numbers, targets: dict[int, Any], *, many: int) -> dict[str, Any]:
    run, result, problems, found = each.run, each.run.result, list[str](), dict[str, Any]()
    sections: dict[str, Callable[[], Any]] = {
        "predictions": lambda: evaluation_of(run, numbers, targets, with_answers=many <= _MAX_ANSWERS),
        "times.jsonl": lambda: time_split_of(run, numbers, cells=min(_CELLS, _MAX_CELLS // many)),
    }
    for name, read in sections.items():
        try:
            found[name] = read()
        except (OSError, ValueError, TypeError, OverflowError, EOFError) as error:
            problems.append(f"{name} cannot be read: {error}")
    reports = [load_report(path) for path in sorted(run.root.glob("failure*.json"))]
    return {
        "name": each.name,
        "folder": run.folder.as_typed(),
        "status": str(run.status),
        "problems": [*run.problems, *problems],
        "values": each.values,
        "group": each.group,
        "max_steps": (run.config.get("trainer") or {}).get("max_steps"),
        "seconds": result.seconds if result else None,
        "samples_seen": result.samples if result else None,
        "early_end": result.early_end if result else None,
        "marks": marks_of(run),
        "times": found.get("times.jsonl"),
        "evaluation": found.get("predictions"),
        "shown": samples_of(run, max_bytes=min(_SAMPLE_BYTES, _MAX_SAMPLE_BYTES // many)),
        "failures": [report.screen(run.folder).strip() for report in reports if report is not None],
        "is_evaluation": run.folder.task.exists(),
    }


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a tree by their dotted names; a list of plain values is one."""
    return {
        key: value
        for key, value in dotted_items(tree)
        if not isinstance(value, Mapping) and not (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))
    }


def _difference(tree: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in tree.items() if key not in first or first[key] != value}
    return {"changed": changed, "absent": [key for key in first if key not in tree]}


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value - value == 0 else None
