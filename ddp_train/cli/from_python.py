"""`ddp_train.run`: the typed command, for Python and notebooks.

The run is a process of its own, `python -m ddp_train ...`, as if it were typed: the caller may have threads, use GPUs, be a notebook or a
Hydra application, and nothing of it changes. Imports neither torch nor Hydra.
"""

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from ddp_train.errors import WRONG_INPUT, UserError, shell_code
from ddp_train.launch.signals import handling_signals
from ddp_train.run_folder import failure
from ddp_train.run_folder.failure import Failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Status
from ddp_train.system import process_env
from ddp_train.system.process import STOP_SIGNALS
from ddp_train.system.process_env import is_torchrun_worker

_CHUNK_BYTES = 1 << 16
_SHOWN = 500  # characters of an error
_WHERE_YAML_LIES = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")
"""The options of `ddp-train` with which it starts a run."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    status: str  # completed; preempted or interrupted, saved: run(["resume=FOLDER"]) continues; queued, by SLURM
    step: int | None = None  # steps taken
    epoch: float | None = None
    samples: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest value of each, as eval/accuracy
    best: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the best value of each, and its step
    seconds: float | None = None


class RunFailed(Exception):
    """A run could not begin, or failed.

    Args:
        message: what is wrong; of a run that failed the rank, the error and the last lines of its traceback.
        exit_code: of `ddp-train`: 2 where nothing was started, because of the overrides.
        folder: of the run; None: there is none.
        failure: what failure.json holds, if there is one.
    """

    def __init__(self, message: str, *, exit_code: int, folder: Path | None = None, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.folder, self.failure = exit_code, folder, failure


def run(overrides: Sequence[str] = ()) -> RunResult:
    """Train as `ddp-train OVERRIDES` does, to the end, and return what came of it.

    What the run says goes where this process prints: in a notebook, into the output of the cell. A stop signal for this process (Ctrl-C,
    the stop button of a notebook) lets the run save and end, and then takes its own effect here: KeyboardInterrupt, as a rule. The run
    ends in the same way when this process is killed.

    Args:
        overrides: words as they are typed, without the shell's quotes: `["model=mlp", "optimizer.lr=0.01"]`; --config-dir=FOLDER too.

    Raises RunFailed: the overrides are wrong (then nothing was started), or the run failed.
    """
    _require_single_run(overrides)
    code, report = run_command([sys.executable, "-m", "ddp_train", *overrides])
    folder = Path(report["folder"]) if "folder" in report else None
    if folder is None or "error" in report:
        reason = f"ddp-train ended with exit code {code}; its output above has the reason"
        raise RunFailed(report.get("error", reason), exit_code=code, folder=folder)
    return _result(RunFolder(folder), code)


def _require_single_run(overrides: Sequence[str]) -> None:
    """Refuse what starts no single run here."""
    if isinstance(overrides, (str, Mapping)) or not all(isinstance(word, str) for word in overrides):
        pairs = overrides.items() if isinstance(overrides, Mapping) else [("model", "mlp"), ("optimizer.lr", "0.01")]
        _refuse(f"overrides is {overrides!r}", expected="a list of strings", fix=f"run({[f'{key}={value}' for key, value in pairs]})")
    words = iter(overrides)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _WHERE_YAML_LIES:
            if not equals:
                next(words, None)  # its value
        elif word.startswith("-") or not (equals or word.startswith("~")) or name.lstrip("+") == "hydra.mode":
            fix = "run() in a loop instead of -m; `ddp-train ...` in a shell for the rest"
            _refuse(f"{word!r} does not start a single run", expected="key=value, group=option, +key=value or ~key", fix=fix)
    if is_torchrun_worker():
        happened, fix = "torchrun has started this process", "torchrun ... -m ddp_train; or this program without torchrun"
        _refuse(happened, expected="a process that may start others itself", fix=fix)


def _refuse(happened: str, *, expected: str, fix: str) -> None:
    raise RunFailed(str(UserError(happened=happened, expected=expected, fix=fix)), exit_code=WRONG_INPUT)


def _result(run_folder: RunFolder, code: int) -> RunResult:
    """Return the result of a run that has ended. RunFailed: it failed, or was ended before there was anything to save."""
    result, folder = run_folder.read_result(), run_folder.root
    if code == 0 and result is None:
        return RunResult(folder=folder, status=Status.QUEUED)
    if result is None or (code != 0 and code != EXIT_CODE_OF_STOP.get(result.status)):
        raise _failure_of(run_folder, code)
    return RunResult(
        folder=folder,
        status=result.status,
        step=result.step,
        epoch=result.epoch,
        samples=result.samples,
        metrics=result.last,
        best=result.metrics.get("best", {}),
        seconds=result.seconds,
    )


def _failure_of(run_folder: RunFolder, code: int) -> RunFailed:
    """Return the failure of a run in a few lines; it has shown its screen, with the traceback."""
    found, lines = failure.load_report(run_folder.failure), [f"The run failed: exit code {code}"]
    if found is not None:
        lines = [f"The run failed: {found.who}" + (f", after step {found.step}" if found.step else ""), found.line(_SHOWN)]
        lines += [f"  fix: {found.fix}"] if found.fix else []
    text = "\n".join([*lines, f"  run folder   {run_folder.as_typed()}"])
    return RunFailed(text, exit_code=code, folder=run_folder.root, failure=found)


def run_command(
    command: list[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str]]:
    """Run a command to its end, and show what it says here. However this process leaves, the command has ended.

    Returns its exit code, and the `folder` and the `error` that it tells its caller (`CommandRunner`).
    """
    outputs = [None if stream in (sys.__stdout__, sys.__stderr__) else stream for stream in (sys.stdout, sys.stderr)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what was printed before comes first
    with tempfile.TemporaryFile() as told, _stop_signals_passed_on() as pass_on_to:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={**(os.environ if environment is None else environment), process_env.CALLER: f"{os.getpid()}:{told.fileno()}"},
            pass_fds=[told.fileno()],
            start_new_session=True,  # Ctrl-C on the terminal, and a notebook's stop button, reach this process alone, which tells it once
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if outputs[0] else None,
            stderr=subprocess.PIPE if outputs[1] else None,
        )
        try:
            pass_on_to(child)
            _show({pipe: stream for pipe, stream in zip((child.stdout, child.stderr), outputs, strict=True) if pipe and stream})
            code = child.wait()
        finally:
            if child.poll() is None:  # an error of ours, or of whoever takes what we show
                child.send_signal(signal.SIGTERM)
            child.communicate()
        told.seek(0)
        report = {kind: text for line in told for kind, text in json.loads(line).items()}
    return shell_code(code), report


def _show(streams: Mapping[IO[bytes], TextIO]) -> None:
    """Show what comes out of pipes until they are closed; from this thread, whose output a notebook puts into the right cell."""
    with selectors.DefaultSelector() as selector:
        for pipe, stream in streams.items():
            selector.register(pipe, selectors.EVENT_READ, (stream, codecs.getincrementaldecoder("utf-8")(errors="replace")))
        while selector.get_map():
            for key, _ in selector.select():
                stream, decoder = key.data
                chunk = os.read(key.fd, _CHUNK_BYTES)
                stream.write(decoder.decode(chunk, final=not chunk))
                stream.flush()
                if not chunk:
                    selector.unregister(key.fileobj)


@contextmanager
def _stop_signals_passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass stop signals on while the block runs, and give what says to whom; afterwards each that came takes its own effect here, once."""
    came, waiting, children = list[int](), list[int](), list[subprocess.Popen[bytes]]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)
        waiting.append(number)
        pass_on()

    def pass_on_to(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        pass_on()

    def pass_on() -> None:
        while children and waiting:
            children[0].send_signal(waiting.pop(0))

    try:
        with handling_signals(STOP_SIGNALS, on_signal):
            yield pass_on_to
    finally:
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
