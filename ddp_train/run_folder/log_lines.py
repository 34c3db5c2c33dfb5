"""Lines of a rank's log that tell how the rank ended; each has its pid, because earlier attempts wrote to the same log."""

import re
from collections.abc import Mapping

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import tail
from ddp_train.system.redaction import redact_code

BEGINS = "begins (pid %d)"  # a rank's first line (`native_error` reads what follows it)
ACTIVITY = "(pid %d) was %s"  # what a rank was doing when it ended (for `last_activities`)

_NATIVE_WORDS = re.compile(r"(?:CUDA error|NCCL error|NCCL WARN|ncclRemoteError|Watchdog caught).*")
_MAX_LINE_CHARACTERS = 300
_TAIL_BYTES = 100_000  # of a rank's log


def native_error(run_folder: RunFolder, rank: int, pid: int) -> str:
    """Return the last line that CUDA or NCCL wrote into the log of an ended rank; "": there is none."""
    text = tail(run_folder.rank_log(rank), _TAIL_BYTES).rpartition(BEGINS % pid)[2]
    lines = [match[0] for line in text.splitlines() if (match := _NATIVE_WORDS.search(line))]
    return redact_code(lines[-1][:_MAX_LINE_CHARACTERS]) if lines else ""


def last_activities(run_folder: RunFolder, pids: Mapping[int, int]) -> dict[int, str]:
    """Return what ranks were doing when they ended, from their logs, by rank; `pids` has the pid of each."""
    activities = {}
    for rank, pid in pids.items():
        lines = re.findall(re.escape(ACTIVITY % (pid, "")) + "(.+)", tail(run_folder.rank_log(rank), _TAIL_BYTES))
        activities[rank] = lines[-1] if lines else "logged nothing"
    return activities
