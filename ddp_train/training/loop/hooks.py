"""The points of the loop with their hooks, and the services that the loop asks of the run around it. Imports neither side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ddp_train.loader.reader import MicroBatch
    from ddp_train.run_folder.paths import RunFolder
    from ddp_train.run_folder.result import Status
    from ddp_train.system.phase import Phases
    from ddp_train.training.record.log_window import Reading
    from ddp_train.training.record.logged import Reduction
    from ddp_train.training.record.records import Records
    from ddp_train.training.state.checkpoints import Checkpoints


@dataclass(frozen=True)
class RunRequest:
    """A request that a person may make to a run while it trains."""

    is_made: Callable[[], bool]  # on this rank
    carry_out: Callable[[int], None]  # called on all ranks after the record, with the steps taken, if it was made on any rank


@dataclass(kw_only=True)
class StepWatch:
    """A hook of steps to come: called before each step while it is on."""

    begin_step: Callable[[int], None]  # gets the number of steps taken; its time is not that of a step
    is_on: bool = False


@dataclass(kw_only=True)
class Hooks:
    """The points of the loop, and what hangs on each, in the order of the calls: of one feature, or of a run (`build/trainer.py`).

    The lists stay as they are while the loop runs. All ranks call the same ones. Those of a step must not wait for the device.
    """

    before_first_step: list[Callable[[MicroBatch], object]] = field(default_factory=list)  # gets its first micro-batch
    wrap_micro_batches: list[Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]] = field(default_factory=list)  # once; after the loader
    when_steps_begin: list[Callable[[], None]] = field(default_factory=list)  # again after a rewind
    before_step: list[StepWatch] = field(default_factory=list)
    after_step: list[Callable[[int], None]] = field(default_factory=list)  # gets the number of steps taken
    after_first_step: list[Callable[[], object]] = field(default_factory=list)  # once, not again after a rewind
    requests: list[RunRequest] = field(default_factory=list)  # looked for at each record
    add_to_reduction: list[Callable[[Reduction], None]] = field(default_factory=list)  # before the one reduction of a record
    at_record: list[Callable[[dict[str, float], Reading], None]] = field(default_factory=list)  # may change a training record's values
    after_evaluation: list[Callable[[dict[str, float]], None]] = field(default_factory=list)  # with its weights; may add to the metrics
    before_save: list[Callable[[int], None]] = field(default_factory=list)  # gets the number of steps taken
    at_end: list[Callable[[Status], None]] = field(default_factory=list)  # in `end`

    def add(self, feature: Hooks) -> None:
        """Add the hooks of a feature, behind those that are there."""
        for point in fields(self):
            getattr(self, point.name).extend(getattr(feature, point.name))


class Agreed(NamedTuple):
    """What the ranks have agreed on one step: the same on all of them."""

    is_last_step: bool  # all stop after it
    is_save_agreed: bool  # all save a checkpoint after it, as one was asked for by the clock


class StopLine(Protocol):
    """The questions of the loop about stops; `rank.stop.Stop`, in a layer above, answers them."""

    def agree_after(self, steps_run: int, /) -> Agreed: ...

    def is_asked(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class RunServices:
    """The services of the run around the loop: it writes, saves and stops by them."""

    run_folder: RunFolder
    phases: Phases
    records: Records
    checkpoints: Checkpoints
    stop: StopLine
    started_at: float = field(default_factory=time.time)  # this attempt, in seconds since the epoch
