"""Where the time of this rank goes, by part of a step (`run_folder.times.PARTS`), always on.

A rank is in one part at a time, and entering another one ends it: parts do not overlap, and sum to the wall time. On the CPU that is two
looks at the clock for each part. On a GPU the host runs ahead, so its clock tells nothing: an event on the stream stands for each look, and
the time between two of them is the device's. An idle device waits in the part that the host is in. Events are read where the device has
passed them, never waited for.

Exposed communication begins when this rank's last gradient is complete, and the last reduction can begin; it ends with backward.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_train.distributed.world import World
from ddp_train.interfaces import Strategy
from ddp_train.run_folder.times import CHECKPOINT, COMMUNICATION, DATA, EVALUATION, OTHER, PARTS
from ddp_train.system.phase import Phase

_PART_OF_PHASE = {Phase.DATA: DATA, Phase.EVALUATION: EVALUATION, Phase.SAVE: CHECKPOINT, Phase.START: CHECKPOINT}  # START: a rewind's
_MOST_EVENTS = 512  # on the stream; then those that the device has passed are read


class TimeSplit:
    """Sums this rank's seconds in each part, by the host's clock."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(PARTS)
        self._part, self._since = OTHER, time.perf_counter()
        self._marks = {name: _Mark(self, part) for part, name in enumerate(PARTS)}
        self._exchanges: WeakKeyDictionary[nn.Module, _Exchange] = WeakKeyDictionary()

    def begin(self) -> None:
        """Count from here on."""
        self.switch(OTHER)
        self.seconds = [0.0] * len(PARTS)

    def switch(self, part: int) -> int:
        """Enter a part, and return the one before."""
        now = time.perf_counter()
        before, self._part = self._part, part
        self.seconds[before] += now - self._since
        self._since = now
        return before

    def take(self) -> list[float]:
        """Return the seconds of each part since the last call."""
        self.switch(self._part)
        seconds, self.seconds = self.seconds, [0.0] * len(PARTS)
        return seconds

    def enter_phase(self, phase: Phase, step: int) -> None:
        """Enter the part that a phase of the rank is (a listener of `Phases`)."""
        self.switch(_PART_OF_PHASE.get(phase, OTHER))

    def mark(self, part: str) -> AbstractContextManager[object]:
        """Return a context that is a part; within another one its time is not counted to that."""
        return self._marks[part]

    def exchange(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context for the forward and backward of the micro-batch whose backward exchanges the module's gradients."""
        if not isinstance(module, DistributedDataParallel):
            return nullcontext()
        if (exchange := self._exchanges.get(module)) is None:
            exchange = self._exchanges[module] = _Exchange(module, lambda: self.switch(COMMUNICATION))
        return exchange

    def end(self) -> None:
        """Take the hooks from the parameters."""
        for exchange in self._exchanges.values():
            exchange.end()


class DeviceTimeSplit(TimeSplit):
    """Sums this rank's seconds in each part by the device's clock; `new_event` makes an event with `record`, `query`, `elapsed_time`."""

    def __init__(self, new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        self._new_event = new_event
        self._events: deque[tuple[int, Any]] = deque()  # the part that begins, and its event, as the stream has them
        self._spare: list[Any] = []
        super().__init__()

    def begin(self) -> None:
        self._events.clear()
        super().begin()
        self._record(OTHER)

    def switch(self, part: int) -> int:
        before, self._part = self._part, part
        if part != before:
            self._record(part)
        return before

    def take(self) -> list[float]:
        self._record(self._part)
        self._read()
        seconds, self.seconds = self.seconds, [0.0] * len(PARTS)
        return seconds

    def _record(self, part: int) -> None:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()  # on the current stream; in backward autograd has made it that of forward
        self._events.append((part, event))
        if len(self._events) > _MOST_EVENTS and len(self._events) % _MOST_EVENTS == 0:
            self._read()

    def _read(self) -> None:
        events = self._events
        while len(events) > 1 and events[1][1].query():
            part, event = events.popleft()
            self.seconds[part] += event.elapsed_time(events[0][1]) / 1e3
            self._spare.append(event)


class _Mark:
    """A part as a context, which may be entered again within itself."""

    def __init__(self, split: TimeSplit, part: int) -> None:
        self._split, self._part = split, part
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(self._split.switch(self._part))

    def __exit__(self, *error: object) -> None:
        self._split.switch(self._before.pop())


class _Exchange:
    """Calls `on_last` when the last gradient of a backward within it is complete: by a hook on that one parameter, found in a backward.

    Where another one is the last, as parameters are unused or frozen, the step is not split, and the next one finds it anew.
    """

    def __init__(self, module: nn.Module, on_last: Callable[[], object]) -> None:
        self._module = ref(module)  # and no parameter, but while one is being found: the hook on it leads here
        self._on_last = on_last
        self._hook: RemovableHandle | None = None
        self._last: Tensor | None = None
        self._is_open = self._has_fired = False

    def __enter__(self) -> None:
        self._is_open, self._has_fired = True, False
        if self._hook is None and (module := self._module()) is not None:
            self._finding = [each.register_post_accumulate_grad_hook(self._note) for each in module.parameters() if each.requires_grad]

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        if self._hook is None:
            for hook in self._finding:
                hook.remove()
            if self._last is not None:
                self._hook, self._last = self._last.register_post_accumulate_grad_hook(self._fire), None
        elif not self._has_fired:
            self.end()

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note(self, parameter: Tensor) -> None:
        self._last = parameter

    def _fire(self, parameter: Tensor) -> None:
        if self._is_open:
            self._has_fired = True
            self._on_last()


def why_not_split(strategy: Strategy, modules: Sequence[nn.Module], world: World) -> dict[str, str]:
    """Return the parts that have no honest source with a strategy and what it has wrapped, each with the reason."""
    reason = ""
    if any(isinstance(part, nn.SyncBatchNorm) for module in modules for part in module.modules()):
        reason = "batch norm of all ranks' samples exchanges within forward and backward, while they compute"
    elif strategy.local_weights is None and not all(isinstance(module, DistributedDataParallel) for module in modules):
        reason = f"{type(strategy).__name__} exchanges within forward and backward, while they compute"
    return {PARTS[COMMUNICATION]: reason} if reason and world.size > 1 else {}
