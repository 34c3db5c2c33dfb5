"""Which rank is slow, and why: by its own time, from the split of all ranks that each record brings. All ranks judge alike.

In synchronous training every rank's steps take equally long: the others wait in the reduction for the slowest. What a rank waits there is
communication, and all its other time in steps is its own. Records are taken together until they are a look of some seconds, as a busy
machine makes single steps slow; several looks in a row are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from ddp_train.run_folder.times import COMMUNICATION, DATA, OTHER, PARTS, added, in_steps

RATIO = 1.3  # a slow rank's own time to the median of the others'
LOOKS = 3  # in a row
_LOOK_S = 2.0
_LEAST_S = 0.002  # a step, by which a slow rank is over that median: less is Python's
_FAR_S = 0.01  # 64 KiB and back take a millisecond in a slow network
_MANY = 64  # ranks: one more or less hardly moves their median
_PAUSE_LOOKS = 60  # from one measurement of the network to the next
_DATA_SHARE = _NETWORK_SHARE = 0.2  # of a step


class Slow(NamedTuple):
    """A slow rank."""

    rank: int
    cause: str  # data | compute | other
    ratio: float
    others: int = 0  # that were found slow at the same time, with a smaller ratio


@dataclass(kw_only=True)
class SlowRanks:
    """Takes the rows of all ranks at each record; `is_split` tells whether the time in which a rank waits is known."""

    is_split: bool = True
    named: dict[int, int] = field(default_factory=dict)  # slow ranks that were named -> looks since they are not
    waits_for_data: float = 0.0  # the share of a step, once it is so in several looks

    def __post_init__(self) -> None:
        self._rows: list[list[float]] = []
        self._steps = self._data_looks = self._network_looks = self._quiet_looks = 0
        self._slow_looks: dict[int, int] = {}

    def look(self, rows: Sequence[Sequence[float]], steps: int) -> Slow | None:
        """Take the rows of a record; return the slowest of the ranks that are found slow now and were not before; None: there is none."""
        self._steps += steps
        self._rows = added(self._rows, rows)
        if not self._steps or max(map(in_steps, self._rows)) < _LOOK_S:
            return None
        rows, steps, self._rows, self._steps = self._rows, self._steps, [], 0
        share = median_low([row[DATA] / (in_steps(row) or 1.0) for row in rows])
        self._data_looks = self._data_looks + 1 if share > _DATA_SHARE else 0
        self.waits_for_data = share if self._data_looks == LOOKS else 0.0
        if len(rows) == 1:
            return None
        own = _own_times(rows, is_split=self.is_split)
        high = [rank for rank in range(len(rows)) if own[rank] > (RATIO - 0.1) * median(own) or len(rows) < _MANY]
        slow = {rank: found for rank in high if (found := _judge(rank, own, rows, steps)) is not None}
        waits = self.is_split and median([row[COMMUNICATION] / (in_steps(row) or 1.0) for row in rows]) > _NETWORK_SHARE
        self._network_looks = self._network_looks + 1 if (waits and not slow) or self._network_looks < 0 else 0
        self._quiet_looks = 0 if waits else self._quiet_looks + 1
        self._slow_looks = {rank: self._slow_looks.get(rank, 0) + 1 for rank in slow}
        self.named = {rank: 0 if rank in slow else looks + 1 for rank, looks in self.named.items()}
        new = [rank for rank, looks in self._slow_looks.items() if looks >= LOOKS and rank not in self.named]
        self.named |= dict.fromkeys(new, 0)
        return max((slow[rank] for rank in new), key=lambda each: each.ratio)._replace(others=len(new) - 1) if new else None

    def recovered(self) -> list[int]:
        """Return the ranks that were named and are slow no more, each once."""
        ranks = [rank for rank, looks in self.named.items() if looks >= LOOKS]
        self.named = {rank: looks for rank, looks in self.named.items() if looks < LOOKS}
        return ranks

    @property
    def waits_no_more(self) -> bool:
        """Whether the ranks have not waited for long in the last looks."""
        return self._quiet_looks >= LOOKS

    def asks_for_ways(self) -> bool:
        """Tell whether the network is to be measured: in the last looks all ranks have waited for long, and for none of them."""
        if self._network_looks < LOOKS:
            return False
        self._network_looks = -_PAUSE_LOOKS
        return True


def _own_times(rows: Sequence[Sequence[float]], *, is_split: bool) -> list[float]:
    """Return each rank's seconds in steps without those in which it waits for others.

    Where waiting is not split from computing, all ranks are taken to compute as long as the one whose time without its data is shortest.
    """
    if is_split:
        return [in_steps(row) - row[COMMUNICATION] for row in rows]
    compute = min(in_steps(row) - row[DATA] for row in rows)
    return [row[DATA] + compute for row in rows]


def _judge(rank: int, own: Sequence[float], rows: Sequence[Sequence[float]], steps: int) -> Slow | None:
    """Return the slow rank that this one is; None: it is as fast as the others."""
    if own[rank] <= RATIO * (usual := _median_without(own, rank)) or own[rank] - usual <= _LEAST_S * steps:
        return None
    cause = "compute"
    for part in (DATA, OTHER) if rank == 0 else (DATA,):  # rank 0 alone writes records
        seconds = [row[part] for row in rows]
        if seconds[rank] - _median_without(seconds, rank) > (own[rank] - usual) / 2:
            cause = PARTS[part]
    return Slow(rank, cause, own[rank] / (usual or own[rank]))


def _median_without(values: Sequence[float], place: int) -> float:
    return median([*values[:place], *values[place + 1 :]])


class Ways(NamedTuple):
    """How far the machines are: the seconds of a message to that of rank `home` and back, by the first rank of each machine."""

    home: int
    seconds: dict[int, float]


def far_machines(ways: Ways) -> list[int]:
    """Return the first ranks of machines whose network is slow; [] where none stands out.

    Where all are far from the home, that is; with two machines both are named: it is the way between them.
    """
    if not (remote := {rank: seconds for rank, seconds in ways.seconds.items() if rank != ways.home}):
        return []
    nearest = min(remote.values())
    if nearest > _FAR_S:
        return [ways.home, *remote] if len(remote) == 1 else [ways.home]
    return [rank for rank, seconds in remote.items() if seconds > max(3 * nearest, _FAR_S)]
