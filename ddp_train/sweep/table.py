"""A sweep as a person sees it: what became of its jobs, one live table while it runs, and a sorted one at its end."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ddp_train.errors import INTERRUPTED, UserError
from ddp_train.launch.engine.engine import Stage, Submission
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.system.files import tail

_COLOURS = {Status.COMPLETED: "green", Status.FAILED: "red", Status.RUNNING: "cyan", Status.QUEUED: "dim"}
_REFRESH_S = 0.5
_TAIL_BYTES = 4096
_WIDTH = 10  # of a number that is shown as it is
_REPEATS = ("seed", "fold")  # the last part of keys that make a job another try of the same, and no other setting
_LINES_AROUND = 8  # the table's head and foot, and the line that the user typed


class SweepScreen:
    """Shows a sweep on the terminal; plain lines where the output is no terminal."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._shown = 0.0
        self._started: dict[int, float] = {}

    def __enter__(self) -> SweepScreen:
        """Say where the sweep lies, and show the table."""
        if not self._started:
            print(f"sweep    {RunFolder(self._sweep.root).shown()}", flush=True)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)  # no thread: agents are forked from here
            self._live.start()
            self._console.show_cursor(True)  # rich hides it, and a launcher that is killed could not bring it back
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def began(self, job: SweepJob) -> None:
        """Show that a job starts."""
        self._started[job.number] = time.monotonic()
        if self._live is None:
            print(f"job {job.number}  {self._values(job)}", flush=True)
        self._refresh()

    def ended(self, job: SweepJob) -> None:
        """Show how a job ended; for a failure, its first traceback."""
        if job.status == Status.FAILED:
            found = failure.load(self._sweep.run_folder(job).failure)
            self.say(f"\njob {job.number} failed  {self._values(job)}{found.screen(self._sweep.run_folder(job)) if found else ''}")
        elif self._live is None:
            done = sum(each.status in (Status.COMPLETED, Status.FAILED) for each in self._sweep.jobs)
            metric = "" if job.metric is None else f"{self._sweep.metric} {job.metric:.4g}  "
            count = f"{done} of {len(self._sweep.jobs)}" if self._sweep.is_planned else f"{done} done"
            print(f"job {job.number}  {job.status}  {metric}in {_seconds(job.seconds) or '?'} s  ({count})", flush=True)
        self._refresh()

    def say(self, text: str) -> None:
        """Print something above the table."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def idle(self) -> None:
        """Bring the table up to date now and then."""
        if time.monotonic() - self._shown > _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        self._shown = time.monotonic()
        if self._live is not None:
            room = max(5, shutil.get_terminal_size().lines - _LINES_AROUND)
            self._live.update(self._progress_table(room), refresh=True)

    def _progress_table(self, room: int) -> Table:
        """Return the running jobs, then those that ended last, as many as there is room for."""
        jobs = self._sweep.jobs
        running = [job for job in jobs if job.status == Status.RUNNING]
        others = [job for job in jobs if job.status not in (Status.RUNNING, Status.QUEUED)]
        shown = sorted((others[-max(0, room - len(running)) :] if room > len(running) else []) + running[:room], key=lambda job: job.number)
        counts = [f"{sum(job.status == status for job in jobs)} {status}" for status in _COLOURS]
        table = _table(self._sweep, caption=", ".join(text for text in counts if not text.startswith("0 ")))
        for job in shown:
            _add(table, self._sweep, job, progress=self._progress(job) if job.status == Status.RUNNING else None)
        return table

    def _progress(self, job: SweepJob) -> tuple[str, str]:
        seconds = _seconds(time.monotonic() - self._started.get(job.number, time.monotonic()))
        record = _last_record(self._sweep.run_folder(job).metrics)
        if not record:
            return "starting", seconds
        loss = record.get("loss")
        return f"step {record['step']}" + (f", loss {loss:.4g}" if isinstance(loss, float) else ""), seconds

    def _values(self, job: SweepJob) -> str:
        return " ".join(f"{key}={_short(self._sweep.value(job, key))}" for key in self._sweep.swept())


def show(sweep: Sweep, alive: Collection[int] = ()) -> None:
    """Print the table of a sweep, the best job first, and where it lies; `alive`: the numbers of the jobs that an engine has."""
    table = _table(sweep)
    for job in sweep.ranked():
        _add(table, sweep, job)
    console = Console(file=sys.stdout)
    console.print(table)
    folder = RunFolder(sweep.root).shown()
    for line in _conclusion(sweep, folder):
        print(line)
    print(f"table    {folder}/sweep.csv", flush=True)
    if alive:
        print(f"{len(alive)} of {len(sweep.jobs)} jobs are queued or running; they go on without this command")
        print(f"  ddp-train runs {folder}   ddp-train status {folder}   ddp-train cancel {folder}", flush=True)
    unfinished = sum(job.status != Status.COMPLETED and job.number not in alive for job in sweep.jobs)
    if unfinished:
        print(f"{unfinished} of {len(sweep.jobs)} jobs are not completed; `ddp-train resume {folder}` runs them", flush=True)


def _conclusion(sweep: Sweep, folder: str) -> list[str]:
    """Return the best job; where jobs repeat others with another seed or fold, the means of those: the best of them was lucky."""
    ranked = [job for job in sweep.ranked() if job.metric is not None]
    if not ranked or sweep.goal is None:
        return []
    repeats = [key for key in sweep.swept() if key.rpartition(".")[2] in _REPEATS]
    if not repeats:
        return [f"best     job {ranked[0].number}: {sweep.metric} {ranked[0].metric:.6g}  {folder}/{ranked[0].folder}"]
    groups: dict[str, list[float]] = {}
    for job in ranked:
        settings = " ".join(f"{key}={_short(sweep.value(job, key))}" for key in sweep.swept() if key not in repeats)
        groups.setdefault(settings, []).append(job.metric or 0.0)
    found = sorted(groups.items(), key=lambda group: fmean(group[1]), reverse=sweep.goal == "max")
    spread = {settings: f", standard deviation {stdev(values):.2g}" if len(values) > 1 else "" for settings, values in found}
    return [
        f"mean     {settings + ': ' if settings else ''}{sweep.metric} {fmean(values):.6g}{spread[settings]}"
        f" over {len(values)} job{'s' * (len(values) != 1)} ({', '.join(repeats)})"
        for settings, values in found
    ]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What the engines say."""

    alive: set[int] = field(default_factory=set)  # the numbers of the jobs that wait in a queue, or run
    problems: list[str] = field(default_factory=list)  # of engines that cannot be asked now


def gather(sweep: Sweep, metric: str | None) -> Gathered:
    """Bring the jobs of a sweep up to date."""
    found = Gathered()
    for job in sweep.jobs:
        sweep.read_result(job, metric)
        submission = Submission.read(sweep.run_folder(job)) if job.status != Status.COMPLETED else None
        if submission is None:
            continue
        try:
            state = submission.state(sweep.run_folder(job))
        except UserError as error:
            found.problems.append(f"{submission.engine}, job {submission.id}: {error.happened}")
            continue
        if state.stage is Stage.ENDED:
            sweep.read_result(job, metric)  # it may have ended just now
            verdict = verdict_of(sweep.run_folder(job))
            if (
                verdict.outcome is Outcome.NEVER and verdict.exit_code != INTERRUPTED
            ):  # no engine starts it again, and no person has stopped it
                job.status = Status.FAILED
        else:
            job.status = Status.QUEUED if state.stage is Stage.QUEUED else Status.RUNNING
            found.alive.add(job.number)
    return found


def _table(sweep: Sweep, caption: str | None = None) -> Table:
    table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = {"tokens_per_s": "tokens/s", "mfu": "MFU"}
    for title in ("job", *sweep.swept(), "status", sweep.metric or "metric", "seconds", *(titles[name] for name in sweep.rates())):
        table.add_column(title, justify="right" if title in ("job", "seconds", *titles.values()) else "left", overflow="fold")
    return table


def _add(table: Table, sweep: Sweep, job: SweepJob, progress: tuple[str, str] | None = None) -> None:
    colour = _COLOURS.get(job.status, "yellow")
    metric, seconds = progress or ("" if job.metric is None else f"{job.metric:.6g}", _seconds(job.seconds))
    status = job.status + (f" (attempt {job.attempts})" if job.attempts > 1 else "")
    table.add_row(
        str(job.number),
        *(escape(_short(sweep.value(job, key))) for key in sweep.swept()),
        f"[{colour}]{status}[/]",
        metric,
        seconds,
        *(_rate(name, getattr(job, name)) for name in sweep.rates()),
    )


def _rate(name: str, rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}" if name == "mfu" else f"{rate:,.0f}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def _short(value: str) -> str:
    """Return a number with the digits that a person reads; sweep.csv has them all."""
    try:
        return value if len(value) < _WIDTH else f"{float(value):.6g}"
    except ValueError:
        return value


def _last_record(metrics: Path) -> dict[str, object]:
    try:
        return next(json.loads(line) for line in reversed(tail(metrics, _TAIL_BYTES).splitlines()) if line.endswith("}"))
    except (ValueError, StopIteration):
        return {}
