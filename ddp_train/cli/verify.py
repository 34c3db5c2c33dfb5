"""`ddp-train verify`: read every file of the checkpoints of a run or a sweep, and say whether they are whole."""

import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.checkpoint.catalog import is_checkpoint, is_name, require_candidates
from ddp_train.checkpoint.manifest import CHUNK_BYTES, FileEntry, compare_files, listed_files, problem_in
from ddp_train.cli.saved_run import parse_words
from ddp_train.cli.status import runs_of
from ddp_train.errors import DONE, FAILED, ConfigError, EnvironmentRefuses, plural, printable
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import step_folders

USAGE = """ddp-train verify RUN|CHECKPOINT [--json]

  RUN            a run folder, or that of a sweep: reads every file of all checkpoints and compares it with its hash; config.yaml,
                 environment.json and result.json are looked at, too
  CHECKPOINT     one checkpoint: RUN/checkpoints/step_00001000, RUN/checkpoints/best
  --json         one JSON object a line for each checkpoint: checkpoint, bytes, problems

Exit code: 0 all is whole; 1 something is damaged; 78 this user may not read a file
"""

_MOST_THREADS = 16


def verify(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train verify RUN|CHECKPOINT`: say which checkpoints are whole, and what is wrong with the others."""
    options, (typed,) = parse_words(arguments, USAGE, {"--json": ""})
    path, damaged = Path(typed), list[str]()
    if is_name(path):
        checkpoints = require_candidates(path, key="CHECKPOINT")[:1]
    elif is_checkpoint(path) or (path.is_dir() and path.parent.name == "checkpoints"):  # which may have lost its manifest
        checkpoints = [path]
    else:
        runs = [ArchivedRun(run.root) for run, _ in runs_of(path) if run.config.exists()]  # a sweep's jobs may wait
        damaged = [f"damaged  {run.folder.as_typed()}/{problem}" for run in runs for problem in run.problems]
        checkpoints = [checkpoint for run in runs for _, checkpoint in step_folders(run.folder.checkpoints)]
    if not checkpoints and not damaged:
        raise ConfigError(key="RUN", happened=f"{typed} has saved no checkpoint", expected="a run that has saved one")
    problems, files = dict[Path, list[str]](), dict[Path, Mapping[str, FileEntry]]()
    for checkpoint in checkpoints:
        files[checkpoint] = listed = dict[str, FileEntry]()
        problem = problem_in(lambda: listed.update(listed_files(checkpoint)))  # noqa: B023 (called at once)
        problems[checkpoint] = [problem] if problem else []
    total = sum(entry["bytes"] for listed in files.values() for entry in listed.values())
    reading, started = _Reading(total), time.monotonic()
    with ThreadPoolExecutor(min(_MOST_THREADS, 2 * (os.cpu_count() or 1))) as pool:
        named = [(checkpoint, name, entry) for checkpoint, listed in files.items() for name, entry in listed.items()]
        tasks = [(checkpoint, pool.submit(reading.problem_of, checkpoint / name, entry)) for checkpoint, name, entry in named]
        try:
            for checkpoint, task in tasks:
                problems[checkpoint] += [problem] if (problem := task.result()) and checkpoint.exists() else []  # a run removes old ones
        except BaseException:  # Ctrl-C, or a file that may not be read: what waits or is read half is not waited for
            reading.is_over = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for checkpoint, found in problems.items():
        size = sum(entry["bytes"] for entry in files[checkpoint].values())
        line = "\n    ".join([f"{'damaged' if found else 'whole  '}  {checkpoint}, {size / 2**20:,.1f} MiB", *found])
        print(json.dumps({"checkpoint": str(checkpoint), "bytes": size, "problems": found}) if "--json" in options else printable(line))
    summary = f"{plural(len(tasks), 'file')}, {total / 1e9:.2f} GB, {total / 1e9 / (time.monotonic() - started):.2f} GB/s"
    print(*map(printable, damaged), summary, sep="\n", file=sys.stderr if "--json" in options else sys.stdout)
    return FAILED if damaged or any(problems.values()) else DONE


class _Reading:
    """Reads files, in several threads at once, and shows on a terminal how far it is."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._shown, self.is_over = total, 0, 0.0, False  # is_over: files that are being read are left

    def problem_of(self, file: Path, entry: FileEntry) -> str:
        """Return what is wrong with a file, or "". Raises EnvironmentRefuses: this user may not read it."""
        if file.is_file() and not os.access(file, os.R_OK):
            raise EnvironmentRefuses(key="RUN", happened=f"this user may not read {file}", fix=f"as its owner: chmod u+r {file}")
        return problem_in(lambda: compare_files(file.parent, {file.name: entry}, self._advance))

    def _advance(self) -> None:
        if self.is_over:
            raise CancelledError
        self._done += CHUNK_BYTES  # roughly: threads may lose one of the other
        if sys.stderr.isatty() and time.monotonic() > self._shown + 0.2:
            self._shown = time.monotonic()
            print(f"\r{min(self._done / self._total, 1):4.0%} of {self._total / 1e9:.1f} GB\033[K\r", end="", file=sys.stderr, flush=True)
