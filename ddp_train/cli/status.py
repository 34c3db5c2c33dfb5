"""`ddp-train status`, `logs` and `verdict`: the state of a run or a sweep, from its folder and from its engine."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ddp_train.cli.saved_run import parse_words, run_of
from ddp_train.config.saved import saved_config
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FINAL, UserError, printable
from ddp_train.launch.engine.engine import Stage, State, Submission, engine_of, submitted_state
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.progress import LogTail, evaluation_line, newest_record, progress_line, slow_ranks
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.sweep import Sweep
from ddp_train.run_folder.times import describe_goodput, read_goodput
from ddp_train.run_folder.verdict import Outcome, Verdict, note_refusal, verdict_of
from ddp_train.system.folder_lock import holder_of, is_locked

USAGE = """ddp-train status RUN [--json]

  RUN            a run folder, or the folder of a sweep: is it queued and why, where does it run, how far is it, how did it end
  --json         one JSON object a line for each run: docs/howto/programs.md
"""

LOGS_USAGE = """ddp-train logs RUN [-f]

  RUN            a run folder, or the folder of a sweep: shows the end of its output; RUN/logs has all of it, and a log of each rank
  -f             follow the output until the run ends
"""
VERDICT_USAGE = """ddp-train verdict RUN [--begins] [--job=ID] [--ended=CODE] [--json]

  RUN            a run folder: prints `done`, `again: why` or `never: why`, for batch scripts and people
  --begins       the run is about to start: count this start, so that it does not restart for ever
  --job=ID       the engine's id of the job that asks: never for one job while another one has the run
  --ended=CODE   the machines have ended with this exit code: 2, 78, 93, 126 and 127 from one that left no report mean never
  --json         as one JSON object: outcome, reason, exit_code

Exit code: 0 done; 75 again; never: the code of the failure (1, 2, 78, 93), or 130 if a person stopped the run.
"""

_LAST_BYTES = 8_000  # of a run's log
_POLL_S = 0.5
_CHECK_EVERY = 10  # polls; whether the run has ended is asked of the engine


def show_status(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train status RUN-or-SWEEP`: show its state. Starts nothing."""
    options, (path,) = parse_words(arguments, USAGE, {"--json": ""})
    for run_folder, name in runs_of(Path(path)):
        result = run_folder.read_result()
        if "--json" in options:
            facts = {"run": str(run_folder.root), "name": name, "state": state_of(run_folder), **verdict_of(run_folder)._asdict()}
            facts |= {"goodput": read_goodput(run_folder), "slow_ranks": slow_ranks(run_folder)}
            print(json.dumps({**facts, "record": newest_record(run_folder), "result": None if result is None else vars(result)}))
            continue
        print(f"{name}: {state_of(run_folder)}", *details(run_folder), sep="\n  ")
        if result is not None and result.status == Status.COMPLETED and result.last:
            values = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in result.last.items())
            print(printable(f"  {', '.join(values)}"))
    return DONE


def runs_of(path: Path) -> Iterator[tuple[RunFolder, str]]:
    """Yield the run of a folder, or those of a sweep, each with its name on the screen."""
    if not is_sweep(path):
        run_folder = RunFolder(run_of(path))
        yield run_folder, run_folder.as_typed()
        return
    sweep = Sweep.load(path.absolute())
    for job in sweep.jobs:
        run_folder = sweep.run_folder(job)
        yield run_folder, f"{job.number}  {sweep.name(run_folder.root)}"


def state_of(run_folder: RunFolder) -> str:
    """Return the state of a run in one line."""
    verdict = verdict_of(run_folder)
    if verdict.outcome is Outcome.DONE:
        return "done"
    submitted = submitted_state(run_folder)
    submission = Submission.read(run_folder)
    id = submission.id if submission is not None else ""
    if isinstance(submitted, State) and submitted.stage is not Stage.ENDED:
        return f"{submitted}, job {id}"
    if is_locked(run_folder.root):
        return f"running ({holder_of(run_folder.root) or 'by an unknown process'})"
    if isinstance(submitted, str):
        return f"not known whether it runs; {verdict}\n  {submitted}"
    if submitted is not None:
        return f"not running; {verdict}\n  job {id} {submitted}"
    return f"not running; {verdict}" if run_folder.logs.exists() or run_folder.read_result() is not None else "not started"


def details(run_folder: RunFolder) -> Iterator[str]:
    """Yield lines on a run: how far it is, its goodput, its slow ranks."""
    config: dict[str, Any] = saved_config(run_folder.root) if run_folder.config.exists() else {}
    if run_folder.evaluation_task.exists():  # an evaluation takes no steps
        if not run_folder.is_completed() and (line := evaluation_line(run_folder)):
            yield line
    elif record := newest_record(run_folder):
        line = progress_line(record, **{name: config.get("trainer", {}).get(name) for name in ("max_steps", "max_epochs")})
        yield line if may_go_on(run_folder) else re.sub(r", [^,]* left$", "", line)
    if (goodput := read_goodput(run_folder)) is not None:
        yield f"goodput: {describe_goodput(goodput)}"
    yield from (f"slow: {line}" for line in slow_ranks(run_folder))
    if run_folder.read_result() is None and run_folder.result.exists():
        yield f"{run_folder.result} is damaged and ignored"


def show_logs(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train logs RUN-or-SWEEP [-f]`: show its output. Starts nothing."""
    options, (path,) = parse_words(arguments, LOGS_USAGE, {"-f": ""})
    runs = [run_folder for run_folder, _ in runs_of(Path(path))]
    tails = {f"{run_folder.root.name}: " if len(runs) > 1 else "": LogTail(run_folder, last=_LAST_BYTES) for run_folder in runs}
    for polls in count():
        is_last = "-f" not in options or (polls % _CHECK_EVERY == 0 and not any(map(may_go_on, runs)))
        for name, tail in tails.items():
            for line in tail.lines():
                print(f"{name}{line}", flush=True)
        if is_last:
            break
        time.sleep(_POLL_S)
    return DONE


def may_go_on(run_folder: RunFolder) -> bool:
    """Tell whether a process or an engine works on a run, as far as it is known."""
    state = submitted_state(run_folder)
    return isinstance(state, str) or (isinstance(state, State) and state.stage is not Stage.ENDED) or is_locked(run_folder.root)


def show_verdict(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train verdict RUN [--begins] [--job=ID] [--ended=CODE] [--json]`: print the verdict on a run, and return it. Starts nothing."""
    options, (path,) = parse_words(arguments, VERDICT_USAGE, {"--begins": "", "--job": "ID", "--ended": "CODE", "--json": ""})
    verdict = _verdict(RunFolder(run_of(Path(path))), options)
    print(json.dumps(verdict._asdict()) if "--json" in options else verdict)
    return verdict.exit_code


def _verdict(run_folder: RunFolder, options: Mapping[str, str]) -> Verdict:
    job, ended = options.get("--job"), int(options.get("--ended") or DONE)
    if job and (other := _other_job(run_folder, job)):
        return Verdict(Outcome.NEVER, f"job {other} has this run", DONE)
    if ended != DONE:
        is_elastic = False
        with suppress(UserError):  # the reason why a machine refused
            is_elastic = Spec.read(run_folder.spec).is_elastic
        note_refusal(run_folder, ended, logs=f"the logs {run_folder.as_typed()}/logs/slurm-*.out", is_elastic=is_elastic)
    verdict = verdict_of(run_folder)
    is_silent = not run_folder.failure.exists() and run_folder.read_result() is None  # no report could be written: a full disk
    if ended in FINAL and verdict.outcome == Outcome.AGAIN and is_silent:
        verdict = Verdict(Outcome.NEVER, f"its machines ended with exit code {ended}; fix the cause in its log", ended)
    if "--begins" in options and verdict.outcome == Outcome.AGAIN:
        try:
            if no_progress := AttemptCount(run_folder).close_before_requeue():
                no_progress.show(run_folder)
                verdict = verdict_of(run_folder)
            else:
                AttemptCount(run_folder).begin_under_engine()
        except OSError as error:
            verdict = Verdict(Outcome.NEVER, f"{run_folder.as_typed()} cannot be written: {error.strerror}", ENVIRONMENT_REFUSES)
    return verdict


def _other_job(run_folder: RunFolder, job: str) -> str:
    """Return the other job that has this run and has not ended; "": there is none, and `job` is recorded as the run's.

    A command that was killed while it submitted has recorded nothing: then a second submission leaves two jobs in the queue.
    """
    recorded = Submission.read(run_folder)
    if recorded is not None and recorded.id == job:
        return ""
    with suppress(UserError):  # in a container without SLURM's commands, say; the folder's lock still keeps two jobs apart
        if recorded is not None and engine_of(recorded.engine).state(recorded.id).stage is not Stage.ENDED:
            return recorded.id
    Submission(engine=Spec.read(run_folder.spec).engine, id=job).write(run_folder)
    return ""
