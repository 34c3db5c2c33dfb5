"""What an examination came to, where the command that asked for it can read it: an engine's machines have no terminal of ours."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from ddp_train.errors import ENVIRONMENT_REFUSES, INTERRUPTED, TERMINATED, EnvironmentRefuses, UserError, printable
from ddp_train.launch.engine.engine import Engine, Stage, State
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json
from ddp_train.system.process import STOP_SIGNALS

_POLL_S = 0.5
_ENDS_WITHIN_S = 60.0  # a job that was told to end at once
_SEEN_WITHIN_S = 3.0  # a network file system may show late what another machine has written


@dataclass(frozen=True, kw_only=True)
class Report:
    """What rank 0 has shown, and the exit code."""

    text: str
    exit_code: int

    def write(self, run_folder: RunFolder) -> None:
        """Write doctor.json, and a result.json that keeps an engine from starting the examination again. A folder may be the very fault."""
        with suppress(OSError):
            write_json(run_folder.doctor, asdict(self))
            Result(status=Status.COMPLETED).write(run_folder.result)

    @classmethod
    def read(cls, run_folder: RunFolder) -> Report | None:
        """Return it; None when the ranks have come to none."""
        if not wait_until(run_folder.doctor.exists, within_s=_SEEN_WITHIN_S, every_s=0.1):
            return None
        return cls(**json.loads(run_folder.doctor.read_text(encoding="utf-8")))


def wait_for_report(run_folder: RunFolder, engine: Engine, id: str) -> int:
    """Wait until an engine's machines were examined, show the report, and return its exit code.

    A stop signal takes the examination back. Whatever ends this, the job has ended, too: the folder is cleared next.
    """
    try:
        with _stops():
            state = _wait_until_ended(engine, id)
    except _Stopped as stop:
        _take_back(engine, id)
        return stop.exit_code
    except BaseException:
        _take_back(engine, id)
        raise
    report = Report.read(run_folder)
    if report is not None:
        print(report.text)
        return report.exit_code
    print(f"job {id} has ended ({state.why}) without a report; it has said:", file=sys.stderr)
    for line in LogTail(run_folder, last=sys.maxsize).lines():
        print(printable(line), file=sys.stderr)
    return ENVIRONMENT_REFUSES


def _wait_until_ended(engine: Engine, id: str) -> State:
    said = ""
    while True:
        try:
            state = engine.state(id)
            line = f"{state.stage}{f' ({state.why})' if state.why else ''}{f' on {chr(44).join(state.nodes)}' if state.nodes else ''}"
            if state.stage is Stage.ENDED:
                return state
        except EnvironmentRefuses as error:  # a controller that is being restarted
            line = str(error)
        if line != said:
            print(f"job {id}: {line}", file=sys.stderr, flush=True)
            said = line
        time.sleep(_POLL_S)


def _take_back(engine: Engine, id: str) -> None:
    """End a job, and wait until it has ended, for a while."""

    def has_ended() -> bool:
        with suppress(UserError):
            return engine.state(id).stage is Stage.ENDED
        return False

    with suppress(UserError):
        engine.stop(id, at_once=True)
    if not wait_until(has_ended, within_s=_ENDS_WITHIN_S, every_s=_POLL_S):
        print(f"job {id} has not ended in {_ENDS_WITHIN_S:.0f} s: it may leave something in its folder", file=sys.stderr)


class _Stopped(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = INTERRUPTED if number == signal.SIGINT else TERMINATED


@contextmanager
def _stops() -> Iterator[None]:
    """Raise `_Stopped` for any stop signal in the block."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    earlier: dict[int, Any] = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def exit_code_of(run_folder: RunFolder, code: int) -> int:
    """Return the exit code of an examination whose ranks have shown it here.

    Args:
        code: of whatever ran them, for one that came to no report.
    """
    report = Report.read(run_folder)
    return report.exit_code if report is not None else code or ENVIRONMENT_REFUSES
