"""What an agent is told beside what torchrun is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_train.run_folder.paths import RunFolder

_NAMES = ("--grace-s=", "--run-dir=", "--group=", "--log=", "--restarts=", "--agent=")


@dataclass(frozen=True, kw_only=True)
class Options:
    """An agent's own options."""

    grace_s: int
    """`cluster.grace_s`."""
    run_folder: RunFolder | None
    """Of the run, where the agent has one."""
    group: Path | None
    """The folder of a sweep's ranks, in which a file names the folder of the job at hand."""
    log: Path | None
    """Where torch's own lines go; None: into the run folder."""
    restarts: int | None
    """How often the ranks of a run over several machines were started again: this agent starts them once and counts nothing; the first
    machine's node program decides what follows (`node/rounds.py`). None: this agent counts."""

    is_plain: bool = False
    """`cluster.agent=torch`: torchrun's own, with nothing of ours in it."""

    @property
    def in_round(self) -> bool:
        """Whether this is one start of all ranks of several machines."""
        return self.restarts is not None


def take_options(arguments: list[str]) -> Options:
    """Take an agent's own options from the front of its arguments; torchrun's remain."""
    given = {}
    while option := next((name for name in _NAMES if arguments and arguments[0].startswith(name)), None):
        given[option] = arguments.pop(0).removeprefix(option)
    return Options(
        grace_s=int(given["--grace-s="]),
        run_folder=RunFolder(Path(given["--run-dir="])) if "--run-dir=" in given else None,
        group=Path(given["--group="]) if "--group=" in given else None,
        log=Path(given["--log="]) if "--log=" in given else None,
        restarts=int(given["--restarts="]) if "--restarts=" in given else None,
        is_plain=given.get("--agent=") == "torch",
    )
