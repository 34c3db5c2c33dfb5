"""times.jsonl: where the time of a run went, by rank and part of a step, over all its attempts; and what of it was useful (goodput).

Rank 0 writes it, with its training records. Nothing is cut off on a resume: steps that are taken again have cost their time.

    {"started": epoch seconds, "restart": false, "queued": false, "step": 0, "hosts": [of each rank], "parts": [names],
     "not_split": {part: why}}
    {"step": 50, "time": epoch seconds, "seconds": since the line before, "steps": 10, "ranks": [[seconds of each part] of each rank]}
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import json_lines, tail
from ddp_train.system.phase import Part

_TAIL_BYTES = 1 << 20  # more than the longest line
_GOODPUT = {
    "steps": "",  # whose results were kept
    "lost": "steps taken again",  # from a checkpoint before them
    "evaluation": "evaluations",
    "checkpoint": "saves",  # what they kept the loop from
    "start": "starting",  # of each attempt, until its first step
    "restart": "restarts",  # from the last line of an attempt until its ranks were started again by their agent
    "queue": "waiting in a queue",  # the same, by an engine with a queue
    "stopped": "stopped",  # the same, by a person
}
"""What the wall time since a run's first start was for, with words for people."""


class Span(NamedTuple):
    """One line of an attempt."""

    step: int  # after it
    time: float
    seconds: float
    steps: int
    ranks: list[Sequence[float | None]]  # seconds of each `Part`; None: it is not split, its seconds are in those around it


@dataclass(kw_only=True)
class AttemptTimes:
    """The first line of an attempt, and the others."""

    started: float
    restart: bool  # its ranks were started again by their agent
    queued: bool  # it was started by an engine with a queue
    step: int  # that it begins at
    hosts: list[str]  # of each rank
    not_split: Mapping[str, str]  # part -> why
    spans: list[Span] = field(default_factory=list)

    @property
    def ended(self) -> float:
        return self.spans[-1].time if self.spans else self.started


def read_times(run_folder: RunFolder, *, most_ranks: int | None = None) -> list[AttemptTimes]:
    """Return the attempts in times.jsonl, with rows of the first ranks alone if `most_ranks` says of how many; [] without one.

    What a kill left half written is left out, and what cannot be understood.
    """
    attempts: list[AttemptTimes] = []
    for content in json_lines(run_folder.times):
        with suppress(KeyError, TypeError, ValueError):
            step = int(content["step"])
            if "started" in content:
                known = {name: content[name] for name in ("restart", "queued", "hosts", "not_split")}
                attempts.append(AttemptTimes(started=float(content["started"]), step=step, **known))
            elif attempts:
                rows = [row for row in content["ranks"] if len(row) == len(Part)][:most_ranks]
                time, seconds, steps = float(content["time"]), float(content["seconds"]), int(content["steps"])
                attempts[-1].spans.append(Span(step, time, seconds, steps, rows))
    return attempts


def newest_shares(run_folder: RunFolder) -> dict[str, float]:
    """Return the share of each part in the newest line, over all ranks; {}: there is none yet."""
    with suppress(IndexError, KeyError, TypeError, ValueError):  # cut off, or the first line of an attempt
        rows = json.loads(tail(run_folder.times, _TAIL_BYTES).splitlines()[-1])["ranks"]
        sums = {part.value: sum(row[i] or 0.0 for row in rows) for i, part in enumerate(Part)}
        return {part: seconds / sum(sums.values()) for part, seconds in sums.items()} if any(sums.values()) else {}
    return {}


def read_goodput(run_folder: RunFolder) -> dict[str, float] | None:
    """Return the goodput of a run until its last record; None: it has no record yet. The rows of thousands of ranks are not kept for it."""
    return goodput_of(read_times(run_folder, most_ranks=1))


def goodput_of(attempts: Sequence[AttemptTimes]) -> dict[str, float] | None:
    """Return the goodput of a run as result.json has it: its `share`, `wall_s`, and the seconds of each part, by rank 0's clock.

    The lines are read backwards: a step is lost if a later line has taken it again.
    """
    if not any(attempt.spans for attempt in attempts):
        return None
    sums, kept_until, later = dict.fromkeys(_GOODPUT, 0.0), math.inf, None
    for attempt in reversed(attempts):
        if later is not None:
            sums["restart" if later.restart else "queue" if later.queued else "stopped"] += max(0.0, later.started - attempt.ended)
        for span in reversed(attempt.spans):
            of_part = dict(zip(Part, span.ranks[0], strict=True)) if span.ranks else {}
            evaluation, checkpoint = of_part.get(Part.EVALUATION) or 0.0, of_part.get(Part.CHECKPOINT) or 0.0
            first, useful = span.step - span.steps, max(0.0, span.seconds - evaluation - checkpoint)
            share = min(1.0, max(0.0, (kept_until - first) / span.steps)) if span.steps else 1.0
            sums["steps"] += share * useful
            sums["lost"] += (1 - share) * useful
            sums["evaluation"] += evaluation
            sums["checkpoint"] += checkpoint
            kept_until = min(kept_until, first)
        if attempt.spans:
            sums["start"] += max(0.0, attempt.spans[0].time - attempt.spans[0].seconds - attempt.started)
        kept_until, later = min(kept_until, attempt.step), attempt
    wall = sum(sums.values())
    return {
        "share": round(sums["steps"] / wall, 4) if wall else 0.0,
        "wall_s": round(wall, 3),
        **{f"{name}_s": round(s, 3) for name, s in sums.items()},
    }


def describe_goodput(goodput: Mapping[str, float]) -> str:
    """Say in one line how much of the time went into steps, and where the rest went."""
    shares = {text: goodput[f"{name}_s"] / (goodput["wall_s"] or 1.0) for name, text in _GOODPUT.items() if text}
    rest = [f"{text} {share:.1%}" for text, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.001]
    return "; ".join([f"{goodput['share']:.1%} of the time since the first start went into steps", *([", ".join(rest)] if rest else [])])
