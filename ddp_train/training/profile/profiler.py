"""When steps are recorded: a window that the section `profile` asks for, and windows that a file in the run's folder asks for.

Steps are those of this start of the run. A run in which nothing is recorded has `is_on` to look at, once a step, and at log steps rank 0
looks for the file; the others learn of it from the reduction that a log step makes anyway.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_train.config.schema import ProfileConfig
from ddp_train.distributed.world import World
from ddp_train.phase import PhaseTracker
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.profile_request import ProfileRequest, is_asked
from ddp_train.training.parts.components import Components
from ddp_train.training.profile.marks import Marks
from ddp_train.training.profile.window import Recording, Span, record

logger = logging.getLogger(__name__)


class Profiler:
    """Records nothing."""

    is_on = False  # whether the loop says when a step begins

    def begin_step(self, step: int) -> None:
        """Say that a step begins, after so many; may take a while where a window ends."""

    def asked(self) -> float:
        """Return whether this rank has found a request, 1.0 or 0.0: to be added up over the ranks at a log step."""
        return 0.0

    def take(self, step: int) -> None:
        """Take up what was asked for. Collective."""

    def close(self) -> None:
        """Say that the last step is over."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Steps to be recorded, by how many this start of the run has taken before."""

    kind: str
    first: int
    steps: int
    warmup: int  # steps before the first, which torch's profiler sees and forgets
    ranks: tuple[int, ...]


class RunProfiler(Profiler):
    """Records windows of a run on the chosen ranks.

    A window that cannot be recorded or written is told of, and ends no run.

    Args:
        config: the section `profile`, also for requests that leave something open.
        tracker: says what this rank is at.
    """

    def __init__(self, config: ProfileConfig, run_folder: RunFolder, world: World, components: Components, tracker: PhaseTracker) -> None:
        self._config, self._run_folder, self._world, self._tracker = config, run_folder, world, tracker
        self._marks = Marks(components, tracker)
        self._taken = 0  # steps of this start, while `is_on`
        self._window: _Window | None = None
        self._recording: Recording | None = None
        self._path = Path()
        if config.kind != "off":
            first = config.start_step
            self._plan(_Window(kind=config.kind, first=first, steps=config.steps, warmup=min(1, first), ranks=tuple(config.ranks)))

    def begin_step(self, step: int) -> None:
        window, before = self._window, self._taken
        self._taken += 1
        if window is None:
            return
        self._marks.pause()
        if before == window.first + window.steps:
            self._end()
        elif self._recording is not None:
            self._recording.next_step()
        elif before == window.first - window.warmup:
            self._begin(window, step)

    def asked(self) -> float:
        return float(self._world.is_main and is_asked(self._run_folder))

    def take(self, step: int) -> None:
        request, problem = self._world.from_main(self._read() if self._world.is_main else None)
        if request is None or self._window is not None:
            self._say(f"profile.request is left aside: {problem or 'a window is to be recorded already'}")
            return
        self._taken = 0
        ranks = tuple(rank for rank in (request.ranks or self._config.ranks) if rank < self._world.size)
        kind = request.kind or (self._config.kind if self._config.kind != "off" else "trace")
        if not ranks:
            self._say(f"profile.request is left aside: the run has ranks 0 to {self._world.size - 1}")
            return
        window = _Window(kind=kind, first=1, steps=request.steps or self._config.steps, warmup=1, ranks=ranks)
        self._plan(window)
        self._say(f"profile  {_steps(step + 2, window.steps)} are recorded on rank {_list(ranks)}: {self._run_folder.shown()}/profile")

    def close(self) -> None:
        window = self._window
        if window is not None and self._taken <= window.first:
            self._say(f"profile  nothing was recorded: the run took {self._taken} steps, and {window.first} come before the window")
        self._end()
        if self._world.is_main and is_asked(self._run_folder):
            self._run_folder.profile_request.unlink(missing_ok=True)
            self._say("profile.request came too late: the run has taken its last step")

    def _read(self) -> tuple[ProfileRequest | None, str]:
        try:
            return ProfileRequest.take(self._run_folder), ""
        except (OSError, ValueError) as error:
            return None, str(error)

    def _plan(self, window: _Window) -> None:
        self._window = window
        self.is_on = True

    def _begin(self, window: _Window, step: int) -> None:
        """Begin the window, or the warm-up before it."""
        if self._world.rank not in window.ranks:
            return
        self._path = _unused(self._run_folder.profile / f"rank_{self._world.rank:05d}_step_{step + window.warmup:06d}")
        try:
            span = Span(number=step + 1, warmup=window.warmup, steps=window.steps)
            self._recording = record(window.kind, self._path, self._world.device, span)
            self._marks.put()
        except Exception as error:  # somebody else's profiler is at work, say
            self._give_up(error)

    def _end(self) -> None:
        """End the window, and write what it has recorded."""
        recording, window = self._recording, self._window
        self._recording = self._window = None
        self.is_on = False
        if recording is None or window is None:
            return
        started = time.perf_counter()
        self._marks.take_out()
        self._tracker.move()
        try:
            text = recording.end()
        except Exception as error:
            self._give_up(error)
            return
        self._tracker.move()
        if text:
            name = f"{self._run_folder.shown()}/profile/{self._path.name}"
            print(f"profile  {name}, written in {time.perf_counter() - started:.1f} s\n{text}", flush=True)

    def _give_up(self, error: Exception) -> None:
        self._marks.take_out()
        self._recording = self._window = None
        self.is_on = False
        logger.warning("rank %d records no profile: %s: %s", self._world.rank, type(error).__name__, error)
        logger.debug("", exc_info=error)

    def _say(self, line: str) -> None:
        if self._world.is_main:
            print(line, flush=True)


def _unused(path: Path) -> Path:
    """Return a path that no file begins with: after a restart a run may come to the same step again."""
    number, found = 1, path
    while any(path.parent.glob(f"{found.name}.*")) or any(path.parent.glob(f"{found.name}_memory.*")):
        number += 1
        found = path.with_name(f"{path.name}_{number}")
    return found


def _steps(first: int, count: int) -> str:
    return f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
