"""The phase and the step that this rank is in, for those who watch it: heartbeats, the console, the profiler, the fault injector.

    start -> data -> step -> data -> step -> evaluation -> save -> data -> ... -> end

Listeners are called on the hot path: a few plain operations each, no lock, no request, no wait.
"""

from collections.abc import Callable
from enum import StrEnum


class Phase(StrEnum):
    START = "start"  # until the first batch is asked for
    DATA = "data"  # waiting for the micro-batches of a step
    STEP = "step"  # forward, backward and the optimizer's step
    EVALUATION = "evaluation"  # entered again for each batch
    SAVE = "save"
    END = "end"  # all steps are taken: the result is written


class Part(StrEnum):
    """What a rank's time goes to: it is in one part at a time, and they sum to the wall time; `Phase.STEP` has several."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"  # waiting for other ranks or the network, with nothing left to compute meanwhile
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"  # what a save keeps the loop from
    OTHER = "other"


PART_OF_PHASE = {
    Phase.START: Part.CHECKPOINT,  # a rewind's: the time begins after the start itself
    Phase.DATA: Part.DATA,
    Phase.STEP: Part.OTHER,  # until a mark says which
    Phase.EVALUATION: Part.EVALUATION,
    Phase.SAVE: Part.CHECKPOINT,
    Phase.END: Part.OTHER,
}

Listener = Callable[[Phase, int], None]  # gets the phase that begins, and the number of steps taken before it
DeviceListener = Callable[[int, bool], None]
"""Gets the number of steps that the device has finished, as last seen, and whether the host waits right now for it to finish one more."""


class Phases:
    """Knows the phase and the step of one rank, and calls its listeners whenever the rank reports progress."""

    def __init__(self) -> None:
        self.phase, self.step = Phase.START, 0
        self.count = 0  # the number of reports: it changes whenever the rank makes progress
        self._listeners: list[Listener] = []
        self._device_listeners: list[DeviceListener] = []

    def listen(self, listener: Listener, *, is_first: bool = False) -> None:
        """Call `listener` at every phase from now on, after those that listen already or before them; and at once."""
        self._listeners.insert(0 if is_first else len(self._listeners), listener)
        listener(self.phase, self.step)

    def forget(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def report_progress(self) -> None:
        """Report progress within the present phase: reading a large file is no hang."""
        self.enter(self.phase, self.step)

    def enter(self, phase: Phase, step: int) -> None:
        """Report that a phase begins, after so many steps."""
        self.phase, self.step = phase, step
        self.count += 1
        for listener in self._listeners:
            listener(phase, step)

    def listen_to_device(self, listener: DeviceListener) -> None:
        """Call `listener` at each `see_device`, which is called for GPUs alone."""
        self._device_listeners.append(listener)

    def see_device(self, step: int, *, is_awaited: bool) -> None:
        """Report how many steps the device has finished, and whether the host waits for one more."""
        for listener in self._device_listeners:
            listener(step, is_awaited)
