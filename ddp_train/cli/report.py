"""`ddp-train report`: write runs and sweeps as one page, once or while they go on, and their curves as figures."""

import time
from pathlib import Path

from ddp_train.archive.report.figures import write_figures
from ddp_train.archive.report.page import collect, page
from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.errors import DONE, ConfigError, plural
from ddp_train.launch.job_runner import JobRunner
from ddp_train.run_folder.paths import is_sweep
from ddp_train.run_folder.result import Status
from ddp_train.system.files import write_atomic

USAGE = """ddp-train report RUN|SWEEP... [--out=FILE.html] [--watch] [--figures=DIR]

  RUN|SWEEP      run folders and folders of sweeps: one page shows all of them; it needs no network and no server
  --out          the file; default: report.html in the folder of the run or sweep, or here for several
  --watch        write it again every few seconds until no process works on any of them; an open page follows
  --figures      write each curve as DIR/SPLIT_NAME.svg, for a paper
"""

_EVERY_S = 5


def report(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train report RUN|SWEEP... [--out=FILE.html] [--watch] [--figures=DIR]`: write a page. Starts nothing."""
    options, words = parse_words(arguments, USAGE, {"--out": "FILE", "--watch": "", "--figures": "DIR"}, most=None)
    folders = [Path(word) if is_sweep(Path(word)) else run_of(Path(word), key="RUN") for word in words]
    file = Path(options.get("--out") or ("report.html" if len(folders) > 1 else folders[0] / "report.html"))
    title = ", ".join("/".join(folder.absolute().parts[-2:]) for folder in folders)
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
