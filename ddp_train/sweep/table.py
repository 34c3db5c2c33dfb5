"""A sweep on the screen: one live table while it runs, and a sorted one at its end; and the state of its jobs, from folders and engines."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ddp_train.errors import INTERRUPTED
from ddp_train.launch.engine.engine import Stage, submitted_state
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import newest_record
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS, Sweep, SweepJob
from ddp_train.run_folder.verdict import Outcome, verdict_of

_COLOURS = {Status.COMPLETED: "green", Status.FAILED: "red", Status.RUNNING: "cyan", Status.QUEUED: "dim"}
_REFRESH_S = 0.5
_MAX_WIDTH = 10  # of a number that is not rounded
_LINES_AROUND = 8  # the table's head and foot, and the line that the user typed


class SweepScreen:
    """Shows a sweep on the terminal; plain lines where the output is no terminal."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._refreshed = 0.0
        self._started: dict[int, float] = {}

    def __enter__(self) -> SweepScreen:
        """Print the sweep's folder, and show the table."""
        if not self._started:
            print(f"sweep    {RunFolder(self._sweep.root).as_typed()}", flush=True)
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
        self._started[job.number] = time.monotonic()
        if self._live is None:
            print(f"job {job.number}  {self._values(job)}", flush=True)
        self._refresh()

    def ended(self, job: SweepJob) -> None:
        if job.status == Status.FAILED:
            recorded = failure.load_report(self._sweep.run_folder(job).failure)
            self.say(f"\njob {job.number} failed  {self._values(job)}{recorded.screen(self._sweep.run_folder(job)) if recorded else ''}")
        elif self._live is None:
            num_done = sum(other.status in (Status.COMPLETED, Status.FAILED) for other in self._sweep.jobs)
            metric = "" if job.metric is None else f"{self._sweep.metric} {job.metric:.4g}  "
            count = f"{num_done} of {len(self._sweep.jobs)}" if self._sweep.is_planned else f"{num_done} done"
            print(f"job {job.number}  {job.status}  {metric}in {_seconds(job.seconds) or '?'} s  ({count})", flush=True)
        self._refresh()

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def idle(self) -> None:
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        if self._live is not None:
            self._live.update(self._progress_table(), refresh=True)

    def _progress_table(self) -> Table:
        """Return the running jobs, and those that ended last where there are rows left."""
        jobs = self._sweep.jobs
        max_rows = max(5, shutil.get_terminal_size().lines - _LINES_AROUND)
        running = [job for job in jobs if job.status == Status.RUNNING][:max_rows]
        ended = [job for job in jobs if job.status not in (Status.RUNNING, Status.QUEUED)]
        rows = running + (ended[-(max_rows - len(running)) :] if len(running) < max_rows else [])
        counts = [f"{sum(job.status == status for job in jobs)} {status}" for status in _COLOURS]
        table = _table(self._sweep, caption=", ".join(text for text in counts if not text.startswith("0 ")))
        for job in sorted(rows, key=lambda job: job.number):
            _add_row(table, self._sweep, job, progress=self._progress(job) if job.status == Status.RUNNING else None)
        return table

    def _progress(self, job: SweepJob) -> tuple[str, str]:
        seconds = _seconds(time.monotonic() - self._started.get(job.number, time.monotonic()))
        if not (record := newest_record(self._sweep.run_folder(job))):
            return "starting", seconds
        loss = record.get("loss")
        return f"step {record['step']}" + (f", loss {loss:.4g}" if isinstance(loss, float) else ""), seconds

    def _values(self, job: SweepJob) -> str:
        return " ".join(f"{key}={_short(self._sweep.value(job, key))}" for key in self._sweep.swept())


def show(sweep: Sweep, alive: Collection[int] = ()) -> None:
    """Print the table of a sweep, the best job first, and its file; `alive`: the numbers of the jobs that an engine has."""
    table = _table(sweep)
    for job in sweep.ranked():
        _add_row(table, sweep, job)
    Console(file=sys.stdout).print(table)
    folder = RunFolder(sweep.root).as_typed()
    best = next(iter(sweep.ranked()), None)
    if any(key.rpartition(".")[2] in REPEATS for key in sweep.swept()):  # the best of jobs that differ by the seed was only lucky
        print(f"means    ddp-train runs --group {folder}")
    elif best is not None and best.metric is not None and sweep.goal is not None:
        print(f"best     job {best.number}: {sweep.metric} {best.metric:.6g}  {folder}/{best.folder}")
    print(f"table    {folder}/sweep.csv", flush=True)
    if alive:
        print(f"{len(alive)} of {len(sweep.jobs)} jobs are queued or running; they continue without this command")
        print(f"  ddp-train runs {folder}   ddp-train status {folder}   ddp-train cancel {folder}", flush=True)
    if unfinished := sum(job.status != Status.COMPLETED and job.number not in alive for job in sweep.jobs):
        print(f"{unfinished} of {len(sweep.jobs)} jobs are not completed; `ddp-train resume {folder}` runs them", flush=True)


@dataclass(frozen=True, kw_only=True)
class EngineAnswers:
    """The engines' answers about the jobs of a sweep."""

    alive: set[int] = field(default_factory=set)  # the numbers of the jobs that wait in a queue, or run
    problems: list[str] = field(default_factory=list)  # of engines that do not answer now


def update(sweep: Sweep, metric: str | None) -> EngineAnswers:
    """Update the jobs of a sweep from their folders and from engines."""
    answers = EngineAnswers()
    for job in sweep.jobs:
        sweep.read_result(job, metric)
        state = submitted_state(sweep.run_folder(job)) if job.status != Status.COMPLETED else None
        if isinstance(state, str):
            answers.problems.append(state)
        elif state is not None and state.stage is Stage.ENDED:
            sweep.read_result(job, metric)  # it may have ended just now
            verdict = verdict_of(sweep.run_folder(job))
            if verdict.outcome is Outcome.NEVER and verdict.exit_code != INTERRUPTED:  # a person may have interrupted it
                job.status = Status.FAILED
        elif state is not None:
            job.status = Status.QUEUED if state.stage is Stage.QUEUED else Status.RUNNING
            answers.alive.add(job.number)
    return answers


def _table(sweep: Sweep, caption: str | None = None) -> Table:
    table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = {"tokens_per_s": "tokens/s", "mfu": "MFU"}
    for title in ("job", *sweep.swept(), "status", sweep.metric or "metric", "seconds", *(titles[name] for name in sweep.rates())):
        table.add_column(title, justify="right" if title in ("job", "seconds", *titles.values()) else "left", overflow="fold")
    return table


def _add_row(table: Table, sweep: Sweep, job: SweepJob, progress: tuple[str, str] | None = None) -> None:
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
    """Return a value, a long number rounded; sweep.csv has all digits."""
    try:
        return value if len(value) < _MAX_WIDTH else f"{float(value):.6g}"
    except ValueError:
        return value
