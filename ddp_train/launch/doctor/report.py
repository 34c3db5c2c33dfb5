"""What an examination came to, where the command that asked for it can read it: an engine's machines have no terminal of ours."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from ddp_train.errors import ENVIRONMENT_REFUSES, INTERRUPTED, printable
from ddp_train.launch.engine.engine import Engine, Stage
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.system.deadline import wait_until
from ddp_train.system.files import write_json

_POLL_S = 0.5
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
    """Wait until an engine's machines were examined, show the report, and return its exit code. Ctrl-C takes the examination back."""
    said = ""
    try:
        while (state := engine.state(id)).stage is not Stage.ENDED:
            line = f"{state.stage}{f' ({state.why})' if state.why else ''}{f' on {chr(44).join(state.nodes)}' if state.nodes else ''}"
            if line != said:
                print(f"job {id}: {line}", file=sys.stderr, flush=True)
                said = line
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        engine.stop(id, at_once=True)
        return INTERRUPTED
    report = Report.read(run_folder)
    if report is not None:
        print(report.text)
        return report.exit_code
    print(f"job {id} has ended ({state.why}) without a report; it has said:", file=sys.stderr)
    for line in LogTail(run_folder, last=sys.maxsize).lines():
        print(printable(line), file=sys.stderr)
    return ENVIRONMENT_REFUSES


def exit_code_of(run_folder: RunFolder, code: int) -> int:
    """Return the exit code of an examination whose ranks have shown it here.

    Args:
        code: of whatever ran them, for one that came to no report.
    """
    report = Report.read(run_folder)
    return report.exit_code if report is not None else code or ENVIRONMENT_REFUSES
