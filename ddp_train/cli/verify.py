"""`ddp-train verify`: read every file of the checkpoints of a run or a sweep, and say whether they are whole."""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from rich.console import Console
from rich.progress import Progress, TransferSpeedColumn

from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.checkpoint.catalog import is_checkpoint, is_name, require_candidates
from ddp_train.checkpoint.manifest import CHUNK_BYTES, FileEntry, compare_files, damage_found_by, listed_files
from ddp_train.cli.saved_run import parse_words
from ddp_train.cli.status import runs_of
from ddp_train.errors import DONE, FAILED, ConfigError, plural, printable
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import RunFolder, step_folders

USAGE = """ddp-train verify RUN|CHECKPOINT [--json]

  RUN            a run folder, or that of a sweep: reads every file of all checkpoints and compares it with its hash; config.yaml,
                 environment.json and result.json are looked at, too
  CHECKPOINT     one checkpoint: RUN/checkpoints/step_00001000, RUN/checkpoints/best
  --json         one JSON object a line for each checkpoint: checkpoint, bytes, problems

Exit code: 0 all is whole; 1 something is damaged
"""


def verify(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train verify RUN|CHECKPOINT`: say which checkpoints are whole, and what is wrong with the others."""
    options, (typed,) = parse_words(arguments, USAGE, {"--json": ""})
    path, damaged = Path(typed), list[str]()
    if is_name(path):
        checkpoints = require_candidates(path, key="CHECKPOINT")[:1]
    elif is_checkpoint(path) or (path.is_dir() and path.parent == RunFolder.of_checkpoint(path).checkpoints):  # one without a manifest
        checkpoints = [path]
    else:
        runs = [ArchivedRun(run.root) for run, _ in runs_of(path) if run.config.exists()]  # a sweep's jobs may wait
        damaged = [f"damaged  {run.folder.as_typed()}/{problem}" for run in runs for problem in run.problems]
        checkpoints = [checkpoint for run in runs for _, checkpoint in step_folders(run.folder.checkpoints)]
    if not checkpoints and not damaged:
        raise ConfigError(key="RUN", happened=f"{typed} has saved no checkpoint", expected="a run that has saved one")
    num_files, total, is_whole = 0, 0, not damaged
    for checkpoint in checkpoints:
        files, found = _read(checkpoint)
        if not checkpoint.exists():  # its run has removed it meanwhile
            continue
        size = sum(entry["bytes"] for entry in files.values())
        num_files, total, is_whole = num_files + len(files), total + size, is_whole and not found
        line = "\n    ".join([f"{'damaged' if found else 'whole  '}  {checkpoint}, {size / 2**20:,.1f} MiB", *found])
        print(json.dumps({"checkpoint": str(checkpoint), "bytes": size, "problems": found}) if "--json" in options else printable(line))
    summary = f"{plural(num_files, 'file')}, {total / 1e9:.2f} GB"
    print(*map(printable, damaged), summary, sep="\n", file=sys.stderr if "--json" in options else sys.stdout)
    return DONE if is_whole else FAILED


def _read(checkpoint: Path) -> tuple[Mapping[str, FileEntry], list[str]]:
    """Read the files of a checkpoint in several threads; return them and what is wrong with them."""
    files, is_over = dict[str, FileEntry](), Event()
    if damage := damage_found_by(lambda: files.update(listed_files(checkpoint))):
        return files, [damage]
    columns, console = (*Progress.get_default_columns(), TransferSpeedColumn()), Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor() as pool,
    ):
        task = progress.add_task(checkpoint.name, total=sum(entry["bytes"] for entry in files.values()))

        def on_progress() -> None:
            if is_over.is_set():
                raise CancelledError
            progress.advance(task, CHUNK_BYTES)

        def damage_of(name: str) -> str | None:
            return damage_found_by(lambda: compare_files(checkpoint, {name: files[name]}, on_progress))

        try:
            return files, [*filter(None, pool.map(damage_of, files))]
        finally:
            is_over.set()  # after Ctrl-C no file is read to its end
