"""The parts of a step in a trace, by name: data, forward, backward, optimizer, evaluation, save.

They are put in while a window is recorded and taken out after it: a step that is not recorded knows nothing of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.profiler import record_function

from ddp_train.phase import Phase, PhaseTracker
from ddp_train.training.loop import gradient
from ddp_train.training.parts.components import Components

PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "save")
_OF_PHASES = {Phase.DATA: "data", Phase.EVALUATION: "evaluation", Phase.SAVE: "save"}


class Marks:
    """Marks the parts of this rank's steps: one at a time, each until the next begins or it ends."""

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
