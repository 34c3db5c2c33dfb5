"""Which rank is slow, and why: by the seconds of all ranks that each record brings. All ranks judge alike.

In synchronous training every rank's steps take equally long: the others wait in the reduction for the slowest. What a rank waits there is
communication, and all its other time in steps is its own. Records are taken together until they are a look of some seconds, as a busy
machine makes single steps slow; several looks in a row are needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_train.system.phase import Part

RATIO = 1.3  # a slow rank's own time to that of the usual one
LOOKS, LOOKS_TO_END = 3, 10  # in a row
PAUSE_LOOKS = 60  # from one measurement of the network to the next
_LOOK_S = 2.0
_LEAST_S = 0.002  # a step, by which a slow rank is over the usual one: less is Python's
_FAR_S = 0.01  # 64 KiB and back take a millisecond in a slow network
_SHARE = 0.2  # of a step, spent waiting for data or messages
_IN_STEPS = [part not in (Part.EVALUATION, Part.CHECKPOINT) for part in Part]  # columns
_FIXES = {  # all ranks wait for such a rank
    "data": "look at its disk, its network to the data, and loader.num_workers",
    "compute": "look at its clock speed and temperature, other processes there, and its own callbacks",
    "network": "look at its cable, its interface (cluster.env.GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and its switch",
}
_FASTER_DATA = "more loader.num_workers, or loader.on_device=true for data that fits; docs/time.md has more"

Table = NDArray[np.float64]
Finding = dict[str, Any]
"""An event (`records.run_event`), but for its step."""


class Streak:
    """Something that holds, or holds no more, once several looks in a row have found it so."""

    def __init__(self) -> None:
        self.holds = False
        self.looks = 0  # since that has changed
        self._against = 0  # looks in a row

    def changes(self, found: bool) -> bool:
        """Take what a look has found; tell whether this changes what holds."""
        self.looks += 1
        self._against = self._against + 1 if found != self.holds else 0
        if self._against < (LOOKS_TO_END if self.holds else LOOKS):
            return False
        self.holds, self.looks, self._against = found, 0, 0
        return True


class SlowRanks:
    """Takes the seconds of all ranks at each record, and reports what is new.

    `hosts`: of each rank. `step`: that the looks begin after. `is_split`: whether the time in which a rank waits for others is known.
    """

    def __init__(self, hosts: Sequence[str], step: int, *, is_split: bool = True) -> None:
        self._hosts, self._is_split = hosts, is_split
        self._slow = [Streak() for _ in hosts]
        self._data, self._network = Streak(), Streak()
        self._far: dict[int, str] = {}  # first ranks of machines whose network is slow, and how far they are
        self._totals, self._step = np.zeros(()), step  # up to the last look
        self.measures_round_trips = False  # the round trips to the machines are to be measured now

    def look(self, totals: Table, step: int, round_trips: Mapping[int, float]) -> Iterator[Finding]:
        """Yield the new events after a step.

        `totals`: the seconds of each rank and part. `round_trips`: those of a message to the ranks' store and back, by the first rank of
        each machine; {}: not known.
        """
        rows, steps = totals - self._totals, step - self._step
        in_steps = rows[:, _IN_STEPS].sum(1)
        self.measures_round_trips = False
        if not steps or in_steps.max() < _LOOK_S:
            return
        self._totals, self._step = totals, step
        of_part = dict(zip(Part, rows.T, strict=True))
        data, waits = of_part[Part.DATA], of_part[Part.COMMUNICATION]
        if self._data.changes(_usual(data) > _SHARE * _usual(in_steps)) and self._data.holds:
            share = _usual(data) / _usual(in_steps)
            text = f"{share:.0%} of each step is spent waiting for data: {_FASTER_DATA}"
            yield {"kind": "waits_for_data", "share": round(share, 3), "text": text}
        # Where waiting is not split from computing, all ranks are taken to compute as long as the one that computes the shortest.
        own = in_steps - waits if self._is_split else data + (in_steps - data).min()
        over = own - _usual(own)
        is_slow = (own > RATIO * _usual(own)) & (over > _LEAST_S * steps)
        changed = [rank for rank, streak in enumerate(self._slow) if streak.changes(bool(is_slow[rank]))]
        if slow := [rank for rank in changed if self._slow[rank].holds]:
            rank = max(slow, key=own.__getitem__)
            cause = "data" if data[rank] - _usual(data) > over[rank] / 2 else "compute"
            ratio, others = float(own[rank] / (_usual(own) or own[rank])), len(slow) - 1
            more = f" (and {others} more ranks)" if others else ""
            text = f"{more} by its {cause}: its own time in a step is {ratio:.3g} times the others'; {_FIXES[cause]}"
            yield self._event("slow_rank", rank, text, cause=cause, ratio=round(ratio, 3), others=others)
        yield from (self._event("slow_rank_over", rank, " is as fast as the others again") for rank in changed if rank not in slow)
        if self._is_split and not is_slow.any():
            yield from self._look_at_network(_usual(waits) > _SHARE * _usual(in_steps), round_trips)

    def _look_at_network(self, waits: bool, round_trips: Mapping[int, float]) -> Iterator[Finding]:
        """Yield the machines that are far now and were not before, and those that are so no more."""
        self._network.changes(waits)
        self.measures_round_trips = self._network.holds and self._network.looks % PAUSE_LOOKS == 0
        if self._network.holds and (self.measures_round_trips or not round_trips):
            return
        far = far_machines(round_trips) if self._network.holds else {}
        for rank in far.keys() - self._far.keys():
            text = f" by its network: all wait for messages; {far[rank]}; {_FIXES['network']}"
            yield self._event("slow_rank", rank, text, cause="network")
        for rank in self._far.keys() - far.keys():
            yield self._event("slow_rank_over", rank, " has a network as fast as the others' again", cause="network")
        self._far = far

    def _event(self, kind: str, rank: int, text: str, **facts: Any) -> Finding:
        host = self._hosts[rank]
        return {"kind": kind, "rank": rank, "host": host, **facts, "text": f"rank {rank} on {host}{text}"}


def _usual(seconds: Table) -> float:
    """Return the median over the ranks, the lower one of two: with two ranks that of the other one."""
    return float(np.quantile(seconds, 0.5, method="lower"))


def far_machines(round_trips: Mapping[int, float]) -> dict[int, str]:
    """Return the first ranks of machines whose network is slow, each with how far it is; {} where none stands out.

    The machine of the store is the nearest. Where all others are far, it is that one; with two machines both are named: it is the way
    between them.
    """
    home = min(round_trips, key=round_trips.__getitem__)
    remote = {rank: f"{1e3 * seconds:.0f} ms to rank {home} and back" for rank, seconds in round_trips.items() if rank != home}
    nearest = min((round_trips[rank] for rank in remote), default=0.0)
    if nearest > _FAR_S:
        return {home: "far from all others", **(remote if len(remote) == 1 else {})}
    return {rank: text for rank, text in remote.items() if round_trips[rank] > max(3 * nearest, _FAR_S)}
