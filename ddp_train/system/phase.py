"""Where this rank is: which phase of which step. The loop tells its listeners (the watchdog, the fault injector).

    start -> data -> step -> data -> step -> evaluation -> save -> data -> ... -> end

Told on the hot path: a listener is a few plain operations, no lock, no request, no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Phase(StrEnum):
    """What a rank is at."""

    START = "start"  # until the first batch is asked for
    DATA = "data"  # waiting for the micro-batches of a step
    STEP = "step"  # forward, backward and the optimizer's step
    EVALUATION = "evaluation"  # told for each batch
    SAVE = "save"
    END = "end"  # all steps are taken: the last words are written


Listener = Callable[[Phase, int], None]  # gets the phase that begins, and the number of steps taken before it
DeviceListener = Callable[[int, bool], None]
"""Gets the number of steps that the device has finished, as last seen, and whether the host waits right now for it to finish one more."""


class PhaseTracker:
    """Tells the listeners of one rank what it is at."""

    def __init__(self) -> None:
        self.phase, self.step = Phase.START, 0
        self.count = 0  # of what was told: a change of it is progress
        self._listeners: list[Listener] = []
        self._device_listeners: list[DeviceListener] = []

    def listen(self, listener: Listener) -> None:
        """Tell `listener` every phase from now on, in the order of these calls; and the present one, at once."""
        self._listeners.append(listener)
        listener(self.phase, self.step)

    def forget(self, listener: Listener) -> None:
        """Tell `listener` no more."""
        self._listeners.remove(listener)

    def move(self) -> None:
        """Say that this rank is at work in the phase that it is in."""
        self.enter(self.phase, self.step)

    def enter(self, phase: Phase, step: int) -> None:
        """Say that a phase begins, after so many steps."""
        self.phase, self.step = phase, step
        self.count += 1
        for listener in self._listeners:
            listener(phase, step)

    def listen_to_device(self, listener: DeviceListener) -> None:
        """Tell `listener` what is seen of the device from now on; on the CPU that is nothing."""
        self._device_listeners.append(listener)

    def see_device(self, step: int, *, is_awaited: bool) -> None:
        """Say how many steps the device has finished, and whether the host waits for one more."""
        for listener in self._device_listeners:
            listener(step, is_awaited)
