"""Which steps are recorded: a window that the section `profile` asks for, and windows that a file in the run's folder asks for.

Steps are those of this start of the run. Where no window is to come nothing is called in a step. At log steps rank 0 looks for the file;
the others learn of it from the reduction that a log step makes anyway.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

from ddp_train.config.schema import ProfileConfig
from ddp_train.distributed.world import World
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.profile_request import ProfileRequest
from ddp_train.training.loop import gradient
from ddp_train.training.loop.trainer import Hooks
from ddp_train.training.parts.components import Components
from ddp_train.training.profile.recording import Recording, start_recording

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Window:
    """Steps to be recorded on some ranks, after `first` steps. The one before, if there is one, warms torch's profiler up."""

    kind: str
    first: int
    steps: int
    ranks: Sequence[int]

    @property
    def warmup(self) -> int:
        return min(1, self.first)


class Profiler:
    """Records windows of a run on the chosen ranks. A window that cannot be recorded or written is told of, and ends no run.

    Args:
        config: the section `profile`, also for requests that leave something open.
        tracker: says what this rank is at.
    """

    def __init__(self, config: ProfileConfig, run_folder: RunFolder, world: World, components: Components, tracker: PhaseTracker) -> None:
        self._config, self._run_folder, self._world, self._tracker = config, run_folder, world, tracker
        self._marks = Marks(components, tracker)
        self._hooks = Hooks()
        self._taken = 0  # steps of this start, or since the request, while a window is to come
        self._window: _Window | None = None
        self._recording: Recording | None = None
        if config.kind != "off":
            self._window = _Window(config.kind, config.start_step, config.steps, config.ranks)

    def hang_on(self, hooks: Hooks) -> None:
        """Let the loop call this, in its steps only while a window is to come."""
        self._hooks = hooks
        hooks.is_asked, hooks.on_request = self.is_requested, self.start_window
        if self._window is not None:
            hooks.before_step.append(self.begin_step)

    def begin_step(self, step: int) -> None:
        """Called before a step, with the number of steps taken; may take a while where a window ends."""
        window, taken = self._window, self._taken
        self._taken += 1
        if window is None:
            return
        self._marks.pause()
        if taken == window.first + window.steps:
            self._end()
        elif self._recording is not None:
            self._recording.next_step()
        elif taken == window.first - window.warmup and self._world.rank in window.ranks:
            self._begin(window, step)

    def is_requested(self) -> float:
        """Return whether this rank sees a request, 1.0 or 0.0: to be added up over the ranks at a log step."""
        return float(self._world.is_main and os.path.exists(self._run_folder.profile_request))  # which never raises

    def start_window(self, step: int) -> None:
        """Plan the window that was requested. Collective."""
        request, problem = self._world.from_main(self._read() if self._world.is_main else None)
        ranks = [rank for rank in ((request and request.ranks) or self._config.ranks) if rank < self._world.size]
        if request is not None and self._window is not None:
            problem = "a window is to be recorded already"
        elif not ranks:
            problem = f"the run has ranks 0 to {self._world.size - 1}"
        if request is None or problem:
            self._print(f"profile.request is left aside: {problem}")
            return
        kind = request.kind or (self._config.kind if self._config.kind != "off" else "trace")
        window = _Window(kind, 1, request.steps or self._config.steps, ranks)
        self._taken, self._window = 0, window
        self._hooks.before_step.append(self.begin_step)
        first, last = step + 2, step + 1 + window.steps
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        self._print(f"profile  {steps} recorded on rank {', '.join(map(str, ranks))}: {self._run_folder.shown()}/profile")

    def close(self) -> None:
        """Called after the last step."""
        window = self._window
        if window is not None and self._taken <= window.first:
            self._print(f"profile  nothing was recorded: the run took {self._taken} steps, and {window.first} come before the window")
        self._end()
        if self.is_requested():
            self._run_folder.profile_request.unlink(missing_ok=True)
            self._print("profile.request came too late: the run has taken its last step")

    def _read(self) -> tuple[ProfileRequest | None, str]:
        try:
            return ProfileRequest.pop(self._run_folder), ""
        except (OSError, ValueError) as error:
            return None, str(error)

    def _begin(self, window: _Window, step: int) -> None:
        path = self._run_folder.profile / f"rank_{self._world.rank:05d}_step_{step + window.warmup:06d}"
        first = step + 1 + window.warmup
        recorded = range(first, first + window.steps)
        try:
            self._recording = start_recording(window.kind, path, self._world.device, step=step + 1, recorded=recorded)
            self._marks.put()
        except Exception as error:  # another profiler is at work, say
            self._give_up(error)

    def _end(self) -> None:
        recording = self._recording
        self._forget()
        if recording is None:
            return
        started = time.perf_counter()
        self._tracker.move()
        try:
            text = recording.end()
        except Exception as error:
            self._give_up(error)
            return
        self._tracker.move()
        if text:
            name = f"{self._run_folder.shown()}/profile/{recording.path.name}"
            print(f"profile  {name}, written in {time.perf_counter() - started:.1f} s\n{text}", flush=True)

    def _give_up(self, error: Exception) -> None:
        self._forget()
        logger.warning("rank %d records no profile: %s: %s", self._world.rank, type(error).__name__, error)
        logger.debug("", exc_info=error)

    def _forget(self) -> None:
        self._marks.take_out()
        self._recording = self._window = None
        if self.begin_step in self._hooks.before_step:
            self._hooks.before_step.remove(self.begin_step)

    def _print(self, line: str) -> None:
        if self._world.is_main:
            print(line, flush=True)


_OF_PHASES = {Phase.DATA: "data", Phase.EVALUATION: "evaluation", Phase.SAVE: "save"}


class Marks:
    """Marks the parts of this rank's steps by name (`PARTS`), one at a time, each until the next begins or it ends.

    They are put in while a window is recorded and taken out after it: a step that is not recorded knows nothing of them.
    """

    def __init__(self, components: Components, tracker: PhaseTracker) -> None:
        self._components, self._tracker = components, tracker
        self._name: str | None = None
        self._range = ExitStack()
        self._undo = ExitStack()

    def put(self) -> None:
        """Begin to mark."""
        components, undo = self._components, self._undo
        self._tracker.listen(self._enter)
        undo.callback(self._tracker.forget, self._enter)
        self.pause()  # what the rank was at last is over
        self._wrap(components, "loss", "forward")
        self._wrap(gradient, "backward", "backward")  # torch has no hook there
        if not components.steps_in_backward:  # else the steps are in the midst of backward, on a thread of torch's
            optimizer = components.optimizer
            undo.callback(optimizer.register_step_pre_hook(lambda *_: self._mark("optimizer")).remove)
            undo.callback(optimizer.register_step_post_hook(lambda *_: self._mark(None)).remove)

    def pause(self) -> None:
        """End the part that is marked."""
        self._mark(None)

    def take_out(self) -> None:
        """Leave everything as it was."""
        self.pause()
        self._undo.close()

    def _enter(self, phase: Phase, step: int) -> None:
        self._mark(_OF_PHASES.get(phase))

    def _mark(self, name: str | None) -> None:
        if name != self._name:  # else a batch of the same evaluation
            self._range.close()
            self._name = name
            if name is not None:
                self._range.enter_context(record_function(name))

    def _wrap(self, owner: Any, function: str, name: str) -> None:
        """Mark each call of an object's method, or of a module's function."""
        original = getattr(owner, function)
        is_own = function in vars(owner)
        setattr(owner, function, record_function(name)(original))
        self._undo.callback(*((setattr, owner, function, original) if is_own else (delattr, owner, function)))
