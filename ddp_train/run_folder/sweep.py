"""A sweep on disk: its folder with sweep.json, from which the sweep can be shown and continued.

    sweep.json  sweep.csv  multirun.yaml (as Hydra writes it)  conf/ (YAML that later jobs are composed from)  0/  1/ ... (run folders)

The folder of a job that has not started yet holds its frozen config already. The outcome of a job is read from its result.json: after a
kill of all processes sweep.json may be a moment behind.
"""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddp_train.errors import ConfigError
from ddp_train.run_folder.paths import SWEEP_FILE, RunFolder, is_sweep
from ddp_train.run_folder.result import Headline, Result, Status
from ddp_train.system.files import write_atomic, write_json
from ddp_train.system.folder_lock import is_locked

RATES = ("tokens_per_s", "mfu")
REPEATS = ("seed", "fold")  # the last words of keys that only repeat a job, with the same settings
GOALS = {"minimize": "min", "maximize": "max"}  # `sweep.direction` -> the goal of the metric, as in an objective


@dataclass(kw_only=True)
class SweepJob:
    number: int
    folder: str  # below the sweep's
    overrides: list[str]  # as the sweeper gave them
    identity: str  # identity of the composed config
    status: Status = Status.QUEUED  # queued, running, or what result.json says
    metric: float | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None  # at its end
    mfu: float | None = None
    attempts: int = 0
    failures: int = 0  # since the job was last requested


@dataclass(kw_only=True)
class Sweep:
    """A sweep, as sweep.json has it."""

    root: Path
    command: list[str]  # the arguments that it was started with
    keys: list[str] = field(default_factory=list)  # the keys that the command sweeps over
    is_planned: bool = False  # every job is in `jobs`; False: the sweeper chooses jobs one by one
    metric: str | None = None
    goal: str | None = None  # min | max
    jobs: list[SweepJob] = field(default_factory=list)

    @classmethod
    def load(cls, root: Path) -> Sweep:
        """Read a sweep from its folder. Raises ConfigError: the folder holds none."""
        try:
            content = json.loads((root / SWEEP_FILE).read_text())
            jobs = [SweepJob(**{**job, "status": Status(job["status"])}) for job in content.pop("jobs")]
            return cls(root=root, jobs=jobs, **content)
        except (FileNotFoundError, NotADirectoryError):
            sweeps = sorted(path.parent for path in root.rglob(SWEEP_FILE))[-1:] if root.is_dir() else []
            fix = f"ddp-train runs {RunFolder(sweeps[0]).as_typed()}" if sweeps else "ddp-train -m key=a,b ... starts one"
            raise ConfigError(happened=f"{root} is not a sweep", expected=f"a folder with {SWEEP_FILE}", fix=fix) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(happened=f"{root} is not a readable sweep: {error}", expected=f"a folder with {SWEEP_FILE}") from None

    def save(self) -> None:
        write_json(self.root / SWEEP_FILE, {name: value for name, value in asdict(self).items() if name != "root"})
        write_atomic(self.root / "sweep.csv", self._csv())

    def run_folder(self, job: SweepJob) -> RunFolder:
        return RunFolder(self.root / job.folder)

    def read_result(self, job: SweepJob, metric: str | None) -> None:
        """Update a job from its result.json. `metric`: the one to compare jobs by; None: the objective's first."""
        result = self.run_folder(job).read_result()
        if result is None:
            result = Result(status=Status.INTERRUPTED if job.attempts else Status.QUEUED)
        job.status, job.seconds = result.status, result.seconds
        job.tokens_per_s, job.mfu = (result.last.get(f"train/{name}") for name in RATES)
        if job.status != Status.COMPLETED:
            job.metric = None
            return
        headline = result.headline or Headline()
        name = metric or headline.get("metric")
        value = result.last.get(name) if name is not None else None
        job.metric = value if value is not None and math.isfinite(value) else None
        self.metric = self.metric or name
        self.goal = self.goal or (headline.get("goal") if name == headline.get("metric") else None)

    def rates(self) -> list[str]:
        """Return the names of the speeds that any job has."""
        return [name for name in RATES if any(getattr(job, name) is not None for job in self.jobs)]

    def ranked(self) -> list[SweepJob]:
        """Return the jobs, the best first, those without a metric last."""
        sign = -1 if self.goal == "max" else 1
        return sorted(self.jobs, key=lambda job: (job.metric is None, sign * (job.metric or 0.0), job.number))

    def swept(self) -> list[str]:
        """Return the keys that the command sweeps over, then others whose values differ between the jobs (a sweeper's own)."""
        values = [_values(job) for job in self.jobs]
        keys = dict.fromkeys(key for overrides in values for key in overrides)
        return self.keys + [key for key in keys if key not in self.keys and len({overrides.get(key) for overrides in values}) > 1]

    def value(self, job: SweepJob, key: str) -> str:
        """Return a job's value for a swept key, as it was written; "": the job does not set it."""
        return _values(job).get(key, "")

    def name(self, run: Path) -> str:
        """Return the values that distinguish the job with this run folder: `optimizer.lr=0.01,model=mlp`."""
        job = next(job for job in self.jobs if self.run_folder(job).root == run)
        return ",".join(f"{key}={self.value(job, key)}" for key in self.keys or _values(job))  # not `swept`: it grows with the jobs

    def _csv(self) -> str:
        swept, text = self.swept(), io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["job", *swept, "status", self.metric or "metric", "seconds", *(rates := self.rates())])
        for job in self.ranked():
            speed = (getattr(job, name) for name in rates)
            writer.writerow([job.number, *(self.value(job, key) for key in swept), job.status, job.metric, job.seconds, *speed])
        return text.getvalue()


def sweep_of(run: Path) -> Path | None:
    """Return the folder of the sweep that a run folder belongs to; None: it belongs to none."""
    sweeps = filter(is_sweep, run.parents)
    return next((sweep for sweep in sweeps if any(run == sweep / job.folder for job in Sweep.load(sweep).jobs)), None)


def update_table(run: Path, status: Status | None = None) -> None:
    """Update a job's row in the table of its sweep, if no process keeps the table: for jobs of an engine.

    Jobs may do so at the same moment: each reads the results of all, and checks again after writing. Without a `status` the row gets the
    content of result.json.
    """
    with suppress(ConfigError, OSError):  # the table is for people: no job fails by it
        root = sweep_of(run)
        while root is not None and not is_locked(root):
            sweep = Sweep.load(root)
            table = sweep._csv()
            for job in sweep.jobs:
                if status is not None and sweep.run_folder(job).root == run:
                    job.status = status
                elif sweep.run_folder(job).read_result() is not None:
                    sweep.read_result(job, sweep.metric)
            if sweep._csv() == table:
                return
            sweep.save()


def _values(job: SweepJob) -> dict[str, str]:
    return {key.lstrip("+~"): value for key, _, value in (text.partition("=") for text in job.overrides)}
