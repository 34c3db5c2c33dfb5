"""times.jsonl: where the time of a run went, by rank and part of a step, over all its attempts; and what of it was useful (goodput).

Rank 0 writes it, with its training records. Nothing is cut off on a resume: steps that are taken again have cost their time.

    {"attempt": 1, "started": epoch seconds, "restart": false, "queued": false, "step": 0, "hosts": [of each rank], "parts": [names],
     "not_split": {part: why}}
    {"step": 50, "time": epoch seconds, "seconds": since the line before, "steps": 10, "ranks": [[seconds of each part] of each rank]}
    {..., "lost": true}: steps that a rewind to `step` has undone before a record
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import GrowingFile, tail

_TAIL_BYTES = 1 << 20  # more than the longest line
PARTS = ("data", "forward", "backward", "communication", "optimizer", "evaluation", "checkpoint", "other")
"""The parts, each without the others: a rank is in one at a time, so that they sum to the wall time.

communication: waiting for other ranks or the network, with nothing left to compute meanwhile. checkpoint: what a save keeps the loop from.
"""

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, EVALUATION, CHECKPOINT, OTHER = range(len(PARTS))
STEP_PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER)

Row = Sequence[float | None]
"""Seconds of each part; None: the part is not split, its seconds are in those around it."""


def added(rows: Sequence[Sequence[float]], more: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the sums of two lists of rows; the first one may be empty."""
    return [[*map(sum, zip(*pair, strict=True))] for pair in zip(rows, more, strict=True)] if rows else [[*row] for row in more]


def in_steps(row: Row) -> float:
    """Return the seconds of a row that are not evaluations and saves."""
    return sum(row[part] or 0.0 for part in STEP_PARTS)


class Span(NamedTuple):
    """One line of an attempt."""

    step: int  # after it
    time: float
    seconds: float
    steps: int
    ranks: list[Row]
    lost: bool = False  # its steps were undone by a rewind to `step`


@dataclass(kw_only=True)
class Attempt:
    """The first line of an attempt, and the others."""

    attempt: int
    started: float
    restart: bool = False  # the ranks were started again by their agent
    queued: bool = False  # it was started by an engine with a queue
    step: int = 0  # that it begins at
    hosts: list[str] = field(default_factory=list)  # of each rank
    not_split: Mapping[str, str] = field(default_factory=dict)  # part -> why
    spans: list[Span] = field(default_factory=list)

    @property
    def ended(self) -> float:
        return self.spans[-1].time if self.spans else self.started


class TimesFile(GrowingFile):
    """Appends to times.jsonl; the first line is that of a new attempt, and gets its number."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._attempts, self._is_new = 0, True
        super().__init__(run_folder.times, keeps=self._keeps)

    def append_line(self, content: Mapping[str, Any]) -> None:
        number = {"attempt": self._attempts + 1} if self._is_new else {}
        self._is_new = False
        self.append(json.dumps({**number, **content}))

    def _keeps(self, line: str) -> bool:
        self._attempts += line.startswith('{"attempt"')
        return line.endswith("}")  # a kill leaves half a line


def read_times(run_folder: RunFolder, *, most_ranks: int | None = None) -> list[Attempt]:
    """Return the attempts in times.jsonl, with rows of the first ranks alone if `most_ranks` says of how many; [] without one.

    What a kill left half written is left out, and what cannot be understood.
    """
    attempts: list[Attempt] = []
    with suppress(OSError), run_folder.times.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(KeyError, TypeError, ValueError):
                content = json.loads(line)
                if "attempt" in content:
                    known = {each.name: content[each.name] for each in fields(Attempt) if each.name in content}
                    attempts.append(Attempt(**known | {"started": float(content["started"]), "step": int(content["step"])}))
                elif attempts:
                    numbers: dict[str, Any] = {name: float(content[name]) for name in ("time", "seconds")}
                    numbers |= {name: int(content[name]) for name in ("step", "steps")}
                    numbers |= {"lost": "lost" in content}
                    rows = [row for row in content["ranks"] if len(row) == len(PARTS)]
                    attempts[-1].spans.append(Span(**numbers, ranks=rows[:most_ranks]))
    return attempts


def newest_shares(run_folder: RunFolder) -> dict[str, float]:
    """Return the share of each part in the newest line, over all ranks; {}: there is none yet."""
    with suppress(IndexError, KeyError, TypeError, ValueError):  # cut off, or the first line of an attempt
        rows = json.loads(tail(run_folder.times, _TAIL_BYTES).splitlines()[-1])["ranks"]
        sums = {part: sum(row[i] or 0.0 for row in rows) for i, part in enumerate(PARTS)}
        return {part: seconds / sum(sums.values()) for part, seconds in sums.items()} if any(sums.values()) else {}
    return {}


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What a run's wall time since its first start was for, in seconds; the parts sum to it."""

    steps: float = 0.0  # whose results were kept
    lost: float = 0.0  # steps that were taken again, from a checkpoint before them
    evaluation: float = 0.0
    checkpoint: float = 0.0  # what saves kept the loop from
    start: float = 0.0  # of each attempt, until its first step
    restart: float = 0.0  # from the last record of an attempt until its ranks were started again
    queue: float = 0.0  # the same, until an engine with a queue started it again
    stopped: float = 0.0  # the same, until a person did

    @property
    def wall(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def share(self) -> float:
        """The useful share of the time, 0 to 1."""
        return self.steps / self.wall if self.wall > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return what result.json and `--json` have of it."""
        return {
            "share": round(self.share, 4),
            "wall_s": round(self.wall, 3),
            **{f"{name}_s": round(s, 3) for name, s in vars(self).items()},
        }

    def __str__(self) -> str:
        rest = sorted(((seconds, name) for name, seconds in vars(self).items() if name != "steps"), reverse=True)
        parts = [f"{_NAMES.get(name, name)} {seconds / self.wall:.1%}" for seconds, name in rest if seconds >= 0.001 * self.wall > 0]
        return f"{self.share:.1%} of the time since the first start went into steps" + (f"; {', '.join(parts)}" if parts else "")


_NAMES = {"lost": "steps taken again", "evaluation": "evaluations", "checkpoint": "saves", "start": "starting"}
_NAMES |= {"restart": "restarts", "queue": "waiting in a queue"}


def read_goodput(run_folder: RunFolder) -> Goodput | None:
    """Return the goodput of a run until its last record; None: it has no record yet. The rows of thousands of ranks are not kept for it."""
    return goodput_of(read_times(run_folder, most_ranks=1))


def goodput_of(attempts: Sequence[Attempt]) -> Goodput | None:
    """Return the goodput of a run until its last record; None: it has no record yet. Times are those of rank 0's clock."""
    if not any(attempt.spans for attempt in attempts):
        return None
    sums = dict.fromkeys(vars(Goodput()), 0.0)
    kept: list[tuple[int, int, float]] = []  # steps (first, last] whose results are kept so far, and the seconds of one
    for index, attempt in enumerate(attempts):
        if index:
            how = "restart" if attempt.restart else "queue" if attempt.queued else "stopped"
            sums[how] += max(0.0, attempt.started - attempts[index - 1].ended)
        sums["lost"] += _undo_after(kept, attempt.step)
        before = attempt.started
        for span in attempt.spans:
            row = next(iter(span.ranks), [0.0] * len(PARTS))
            evaluation, checkpoint = row[EVALUATION] or 0.0, row[CHECKPOINT] or 0.0
            in_span = min(span.seconds, max(0.0, span.time - before))
            sums["start"] += max(0.0, span.time - before) - in_span  # of the first line alone: others follow each other
            sums["evaluation"] += evaluation
            sums["checkpoint"] += checkpoint
            sums["lost"] += _undo_after(kept, span.step - span.steps)  # after a rewind
            useful = max(0.0, in_span - evaluation - checkpoint)
            if span.steps:
                kept.append((span.step - span.steps, span.step, useful / span.steps))
            else:
                sums["lost" if span.lost else "steps"] += useful
            before = span.time
    sums["steps"] += sum((last - first) * seconds for first, last, seconds in kept)
    return Goodput(**sums)


def _undo_after(kept: list[tuple[int, int, float]], step: int) -> float:
    """Take out of `kept` what came after a step, and return its seconds."""
    seconds = 0.0
    while kept and kept[-1][1] > step:
        first, last, each = kept.pop()
        seconds += (last - max(first, step)) * each
        if first < step:
            kept.append((first, step, each))
    return seconds
