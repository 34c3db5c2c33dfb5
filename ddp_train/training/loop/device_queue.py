"""How far the host may be ahead of a GPU."""

from collections import deque

import torch

from ddp_train.system.phase import Phases

STEPS_AHEAD = 8
"""Two would keep the device busy; eight outlast what holds a host up for a moment (a slow batch, a collection of garbage)."""


class DeviceQueue:
    """Marks the end of each step on the current stream, and waits for the oldest mark where there are too many.

    On a GPU the host only puts work into a queue. Without a bound one rank's host could be many steps ahead of another's, a stop would come
    late, and the batches of all these steps would lie in the device's memory. `Phases` is told which step the device has finished,
    whenever a look was taken, and while the host waits for the next one.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()
        self._spare = [torch.cuda.Event(blocking=True) for _ in range(STEPS_AHEAD + 1)]  # blocking: the host sleeps while it waits

    def after_step(self, step: int) -> None:
        """Called when all work of a step is in the queue; wait while the device has more than `STEPS_AHEAD` steps to finish."""
        event = self._spare.pop()
        event.record()
        self._under_way.append((step, event))
        while self._under_way and self._under_way[0][1].query():
            self._spare.append(self._under_way.popleft()[1])
        is_full = len(self._under_way) > STEPS_AHEAD
        self._tell(step, is_awaited=is_full)
        if is_full:
            self._under_way[0][1].synchronize()
            self._spare.append(self._under_way.popleft()[1])
            self._tell(step, is_awaited=False)

    def _tell(self, step: int, *, is_awaited: bool) -> None:
        self._phases.see_device(self._under_way[0][0] - 1 if self._under_way else step, is_awaited=is_awaited)
