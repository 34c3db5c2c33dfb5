"""The page of one or several runs: one HTML file with all that it shows, and the program that shows it."""

from __future__ import annotations

import base64
import gc
import html
import json
import math
import os
import re
import shlex
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ddp_train.archive.archived_run import BAD_FILE, ArchivedRun
from ddp_train.archive.groups import grouped, is_repeat, key_of, labels, settings_of, telling_keys
from ddp_train.archive.index import read, row_of
from ddp_train.archive.report.curves import curves_of, marks_of, time_split_of
from ddp_train.archive.report.samples import predictions_of, shown_by
from ddp_train.run_folder.failure import load_report
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.sweep import Sweep
from ddp_train.run_folder.times import read_times

_HERE = Path(__file__).parent
_POINTS, _MAX_POINTS = 20_000, 480_000  # of the curves of one run, and of all: 300 kB and 3 MB
_CELLS, _MAX_CELLS = 8_000, 60_000  # of the time split
_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = 60_000, 400_000
_MAX_SERIAL, _MAX_ANSWERS = 8, 8  # runs that one process reads, and whose answers to each sample are there
_MAX_KEYS, _LEAST_RUNS = 12, 4  # keys in which runs differ, as columns; runs that say which key matters


@dataclass(kw_only=True)
class Shown:
    """A run on a page: its name there, and its values of the keys in which the runs differ."""

    run: ArchivedRun
    name: str
    values: dict[str, Any]
    group: int  # runs of one have the same settings: chance alone is between them
    label: str  # of its group
    counts: bool  # as a sample of its group, as in `runs --group`


def collect(folders: Sequence[Path]) -> list[Shown]:
    """Return the runs of some folders of runs and sweeps. Raises ConfigError: a sweep that cannot be read."""
    runs, keys, groups = list[ArchivedRun](), list[str](), dict[tuple[Any, ...], int]()
    for folder in folders:
        if is_sweep(folder):
            sweep = Sweep.load(folder.absolute())
            keys += sweep.swept()
            runs += [ArchivedRun(sweep.run_folder(job).root) for job in sweep.jobs]
        else:
            runs.append(ArchivedRun(folder))
    if not runs:
        return []
    rows = [row_of(*read(run)) for run in runs]
    counted = {folder for group in grouped(rows) for folder in group.folders}
    numbers = [groups.setdefault(settings_of(row), len(groups)) for row in rows]
    names = labels([rows[numbers.index(number)] for number in groups.values()])
    parent = os.path.commonpath([run.root.absolute().parent for run in runs])
    if len(folders) > 1:
        keys += [key_of(word) for row in rows for word in shlex.split(row["typed"] or "")]
    keys = telling_keys(rows, keys, most=_MAX_KEYS if len(folders) > 1 else 1)
    shown = []
    for run, row, number in zip(runs, rows, numbers, strict=True):
        name, values = os.path.relpath(run.root.absolute(), parent), {key: row.get(key) for key in keys}
        shown.append(Shown(run=run, name=name, values=values, group=number, label=names[number], counts=row["folder"] in counted))
    return shown


def page(shown: Sequence[Shown], *, title: str, reload_s: int = 0) -> str:
    """Return a page of runs as HTML. `reload_s`: the page loads itself again after so many seconds; 0: it is final."""
    described = partial(_described, many=len(shown))
    if len(shown) <= _MAX_SERIAL:
        runs = list(map(described, shown))
    else:
        # Without the collector, which looks through millions of numbers again and again, it takes a fifth less.
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"), initializer=gc.disable) as pool:
            runs = list(pool.map(described, shown))
    headline = next((each.run.headline for each in shown if each.run.result is not None), shown[0].run.headline)
    newest = [run["last"].get(headline["metric"]) for run in runs]
    metrics = [value if isinstance(value, (int, float)) and math.isfinite(value) else None for value in newest]
    content = {
        "title": title,
        "made": time.time(),
        "reload": reload_s,
        "headline": headline,
        "keys": [*shown[0].values],
        "settings": [*_settings(shown[0])],
        "importance": importance_of([_settings(each) for each in shown], metrics, goal=headline["goal"]),
        "config": [each.run.config for each in shown],  # one after the other, so that equal parts compress to nothing
        "environment": [{**each.run.environment, "commit": each.run.commit} for each in shown],
        "runs": runs,
    }
    finite = json.loads(json.dumps(content, default=_as_text), parse_constant=str)  # JSON, and a browser, know no NaN
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (_HERE / "uplot/uPlot.min.css").read_text() + (_HERE / "page.css").read_text(),
        "LIBRARY": f"/* uPlot\n{(_HERE / 'uplot/LICENSE').read_text()}*/\n{(_HERE / 'uplot/uPlot.iife.min.js').read_text()}",
        "PROGRAM": (_HERE / "page.js").read_text(),
        "CONTENT": base64.b64encode(zlib.compress(json.dumps(finite, separators=(",", ":")).encode(), 9)).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], (_HERE / "page.html").read_text())


def _described(each: Shown, *, many: int) -> dict[str, Any]:
    """Return the content for one run on a page of `many`. A damaged file is one of its problems, and the rest is shown."""
    run, problems = each.run, each.run.problems

    def read(file: str, part: Callable[[], Any]) -> Any:
        try:
            return part()
        except (*BAD_FILE, EOFError) as error:
            problems.append(f"{file} cannot be read: {error}")

    attempts = read_times(run.folder)
    reports = [load_report(path) for path in sorted(run.root.glob("failure*.json"))]
    return {
        **{name: value for name, value in vars(each).items() if name != "run"},
        "folder": run.folder.as_typed(),
        "status": str(run.status),
        "problems": problems,
        "last": run.last,
        "best": run.best,
        "step": run.step,
        **{name: getattr(run.result, name, None) for name in ("seconds", "samples", "error", "early_end")},
        "curves": {},
        "axes": {},
        **(read(run.folder.metrics.name, lambda: curves_of(run, points=min(_POINTS, _MAX_POINTS // many))) or {}),
        "marks": marks_of(run, attempts),
        "times": read(run.folder.times.name, lambda: time_split_of(attempts, cells=min(_CELLS, _MAX_CELLS // many))),
        "evaluation": read(run.folder.predictions.name, lambda: predictions_of(run, with_answers=many <= _MAX_ANSWERS)),
        "shown": shown_by(run, max_bytes=min(_SAMPLE_BYTES, _MAX_SAMPLE_BYTES // many)),
        "failures": [report.screen(run.folder).strip() for report in reports if report is not None],
    }


def _settings(each: Shown) -> dict[str, Any]:
    return {key: value for key, value in each.values.items() if not is_repeat(key)}


def importance_of(values: Sequence[Mapping[str, Any]], metrics: Sequence[float | None], *, goal: str) -> dict[str, float]:
    """Return the share of each key in how good a run is; {}: Optuna 3.6 or newer is not installed, or too few runs have the metric.

    Source: Watanabe et al. 2023, arXiv:2304.10255 (PED-ANOVA).
    """
    counted = [(row, metric) for row, metric in zip(values, metrics, strict=True) if metric is not None]
    is_installed = False
    with suppress(metadata.PackageNotFoundError):
        is_installed = tuple(map(int, metadata.version("optuna").split(".")[:2])) >= (3, 6)  # to import an older one takes a second
    if not is_installed or len(counted) < _LEAST_RUNS:
        return {}
    optuna: Any = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions, trials = dict[str, Any](), [dict[str, Any]() for _ in counted]
    for key in counted[0][0]:
        found = [row[key] for row, _ in counted]
        if all(type(value) in (int, float) and math.isfinite(value) for value in found):
            distributions[key] = optuna.distributions.FloatDistribution(min(found), max(found), log=0 < 10 * min(found) <= max(found))
        else:
            found = [str(value) for value in found]
            distributions[key] = optuna.distributions.CategoricalDistribution(sorted(set(found)))
        for trial, value in zip(trials, found, strict=True):
            trial[key] = value
    study = optuna.create_study(direction=f"{goal}imize")
    for trial, (_, metric) in zip(trials, counted, strict=True):
        study.add_trial(optuna.trial.create_trial(params=trial, distributions=distributions, value=metric))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _as_text(value: Any) -> str:
    """Return an array, for which JSON has no form, as text: float32, the first bytes of all numbers first, so that they compress well."""
    if not isinstance(value, np.ndarray):
        return str(value)
    return base64.b64encode(value.ravel().astype("<f4").view(np.uint8).reshape(-1, 4).T.tobytes()).decode()
