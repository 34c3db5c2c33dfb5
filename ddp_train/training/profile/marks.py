"""The parts of a step in a trace, by name: data, forward, backward, optimizer, evaluation, save.

They are put in while a window is recorded and taken out after it: a step that is not recorded knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ddp_train.phase import Phase, PhaseTracker
from ddp_train.training.loop import train_step
from ddp_train.training.parts.components import Components

PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "save")
_OF_PHASES = {Phase.DATA: "data", Phase.EVALUATION: "evaluation", Phase.SAVE: "save"}


class Marks:
    """Marks the parts of this rank's steps: one at a time, each until the next begins or it ends."""

    def __init__(self, components: Components, tracker: PhaseTracker) -> None:
        self._components, self._tracker = components, tracker
        self._name: str | None = None
        self._range: torch.profiler.record_function | None = None
        self._undo = ExitStack()

    def put(self) -> None:
        """Begin to mark."""
        components, undo = self._components, self._undo
        self._tracker.listen(self._enter)
        undo.callback(self._tracker.forget, self._enter)
        self.pause()  # what the rank was at last is over
        for owner in (components, *components.turns.values()):
            self._wrap(owner, "loss", "forward")
        self._wrap(train_step, "backward", "backward")  # torch has no hook there
        if components.early_step is not None:  # its steps are in the midst of backward, on a thread of torch's
            return
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
        if name == self._name:  # a batch of the same evaluation
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._name, self._range = name, None if name is None else torch.profiler.record_function(name)
        if self._range is not None:
            self._range.__enter__()

    def _wrap(self, owner: Any, method: str, name: str) -> None:
        """Let a method of an object be marked, or a function of a module."""
        before: Callable[..., Any] = getattr(owner, method)
        is_own = method in vars(owner)

        def marked(*arguments: Any, **named: Any) -> Any:
            self._mark(name)
            try:
                return before(*arguments, **named)
            finally:
                self._mark(None)

        setattr(owner, method, marked)
        self._undo.callback(*((setattr, owner, method, before) if is_own else (delattr, owner, method)))
