"""`ddp-train report`: write runs and sweeps as one page, once or while they go on, and their curves as figures."""

import time
from pathlib import Path

from ddp_train.archive.index import find
from ddp_train.archive.report.figures import write_figures
from ddp_train.archive.report.page import collect, page
from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.errors import DONE, ConfigError, join_few, plural
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.result import Status
from ddp_train.system.files import write_atomic

USAGE = """ddp-train report RUN|SWEEP... [--out=FILE.html] [--watch] [--figures=DIR]

  RUN|SWEEP      run folders, folders of sweeps, and folders with runs below: one page shows all; it needs no network and no server
  --out          the file; default: report.html in the folder of the run or sweep, or here for several
  --watch        write it again every few seconds until no process works on any of them; an open page follows
  --figures      write each curve as DIR/SPLIT_NAME.svg, for a paper
"""

_EVERY_S = 5


def report(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train report RUN|SWEEP... [--out=FILE.html] [--watch] [--figures=DIR]`: write a page. Starts nothing."""
    options, words = parse_words(arguments, USAGE, {"--out": "FILE", "--watch": "", "--figures": "DIR"}, most=None)
    folders = [folder for word in words for folder in _folders(Path(word))]
    parent = "" if len(words) > 1 else words[0] if Path(words[0]).is_dir() else folders[0]
    file = Path(options.get("--out") or Path(parent, "report.html"))
    names = ["/".join(folder.absolute().parts[-2:]) for folder in folders]
    title = join_few(names, 3) if len(names) < 4 else f"{len(names)} runs: {join_few(names, 2)}"
    goes_on = True
    while goes_on:
        if not (shown := collect(folders)):
            raise ConfigError(key="SWEEP", happened=f"{words[0]} has no job yet", expected="a sweep with jobs")
        goes_on = "--watch" in options and any(each.run.status in (Status.QUEUED, Status.RUNNING) for each in shown)
        write_atomic(file, page(shown, title=title, reload_s=_EVERY_S if goes_on else 0))
        time.sleep(_EVERY_S if goes_on else 0)
    print(f"{file}: {plural(len(shown), 'run')}, {file.stat().st_size / 1000:,.0f} kB")
    if "--figures" in options:
        print(f"{options['--figures']}: {plural(len(write_figures(shown, Path(options['--figures']))), 'figure')} as SVG")
    return DONE


def _folders(path: Path) -> list[Path]:
    """Return the run or the sweep at a path, or the runs below it."""
    below = [] if is_sweep(path) or RunFolder(path).config.exists() else sorted(Path(run.path) for run in find(path))
    return below or [path if is_sweep(path) else run_of(path, key="RUN")]
