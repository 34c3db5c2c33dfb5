"""Whether all ranks still have the same weights: they must, to the last bit, and a bit that flips on one of them is not seen otherwise.

Each rank adds up the bits of every tensor as integers, on its device, and the smallest and the largest sum of all ranks must be one. Of
what else all must have (schedule, loss scale, position) hashes are compared. Where something differs, all ranks' sums are gathered.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.interfaces import Strategy, few, is_cut, num_replicas, num_shards, own_rows

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_OPTIMIZER = "optimizer's tensors"
_NOTHING = torch.iinfo(torch.int64).max  # of a shard that this rank does not have: never the smallest


class ReplicaError(RunError):
    """The ranks do not have the same weights any more."""


@dataclass
class ReplicaCheck:
    """Compares what all ranks must have alike, now and then. Made on all of them, when the model is as it will be trained.

    Parameters are compared, the optimizer's tensors, and the buffers that training does not change. Those that it does (batch norm's
    averages) are each rank's own from one synchronised forward to the next, which begins with rank 0's; rank 0's are what is saved.
    Of what a strategy has cut among the ranks those are compared that several ranks have (replicas of a shard).
    Where ranks take steps of their own they are compared when they have synchronised, with what that needs instead of their optimizers.
    """

    model: nn.Module  # what is trained, an objective with weights of its own included
    world: World
    _: KW_ONLY
    every_steps: int  # between two comparisons; each save has one before it besides, because every rank may write a part of it
    optimizer: Optimizer
    others: Callable[[], Mapping[str, str]]  # return a hash of each other thing that must be the same, by name
    strategy: Strategy = field(default_factory=Strategy)

    def __post_init__(self) -> None:
        self._checked = -1  # the step after which it was done last
        self._is_due = False
        self._parameters = {name: each for name, each in self.model.named_parameters() if _has_replicas(each)}
        self._buffers = dict(self.model.named_buffers())
        self._buffers_at_start = self._sums(self._buffers)

    def after_step(self, step: int) -> None:
        """Compare if it is time. Collective."""
        if step <= self._checked:  # after a rewind
            self._checked = -1
        self._is_due |= step % self.every_steps == 0
        if self._is_due and self.strategy.are_alike:
            self._check(step)

    def before_save(self, step: int) -> None:
        """Compare, unless it has just been done. Collective."""
        if step != self._checked and self.strategy.are_alike:
            self._check(step)

    def _check(self, step: int) -> None:
        """Compare; a ReplicaError, on all ranks, has the rank and the tensor that differ."""
        self._checked, self._is_due = step, False
        kept = self._kept()
        facts = {_OF_OPTIMIZER: hashlib.sha256(" ".join(kept).encode()).hexdigest(), **self.others()}
        different: dict[str, dict[int, Any]] = {}  # what the ranks have that must have the same, by what it is
        # What differs is asked first, in as few numbers for thousands of ranks as for two. Who has what is asked if something does.
        if not self.world.are_alike(_hash(facts)).all():
            every = self.world.gather(facts)
            columns = {name: {rank: each.get(name) for rank, each in enumerate(every)} for name in sorted(set().union(*every))}
            different = {name: column for name, column in columns.items() if len(set(column.values())) > 1}
        if _OF_OPTIMIZER not in different:  # else their sums are not as many on each rank
            different |= self._different({**self._parameters, **kept, **self._buffers})
        if not different:
            return
        hosts = self.world.gather(socket.gethostname())
        drifted: dict[int, list[str]] = {}
        unclear = []
        for name, column in different.items():
            value, count = Counter(column.values()).most_common(1)[0]
            if count * 2 <= len(column):
                unclear.append(name)
                continue
            for rank in [rank for rank, each in column.items() if each != value]:
                drifted.setdefault(rank, []).append(name)
        found = [f"rank {rank} on {hosts[rank]} differs from the others in {few(names)}" for rank, names in sorted(drifted.items())]
        if unclear:
            found.append(f"the ranks differ in {few(unclear)}, and no majority says which is right")
        raise ReplicaError(
            key="health.check_replicas_every_steps",
            happened=f"a corrupted replica, found after step {step}: {'; '.join(found)}",
            expected="the same weights, optimizer state and schedule on all ranks, bit for bit",
            fix="ddp-train resume RUN, which goes on from the newest checkpoint: nothing was saved since; if it is the same machine again,"
            " replace it (memory), or look for code that changes weights on one rank alone",
        )

    def _different(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
        """Return the sums of tensors (buffers last) that differ where the rows are the same, by rank; buffers may change. Collective."""
        if not tensors:
            return {}
        sums, places = self._sums(tensors), torch.arange(len(tensors))
        shards = [num_shards(tensor) for tensor in tensors.values()]
        own = torch.tensor([self.world.rank % count for count in shards])  # as ranks are laid out
        both = torch.full([2, len(tensors), max(shards)], _NOTHING, device=sums.device)
        both[0, places, own], both[1, places, own] = sums, ~sums  # the smallest of these is the largest with all bits turned around
        lowest, highest = self.world.lowest(both).cpu()
        is_alike = (lowest == ~highest) | (lowest == _NOTHING)
        if self._buffers:
            first = len(tensors) - len(self._buffers)
            is_alike[first:, 0] |= ~self._are_constant(sums[first:])
        if is_alike.all():
            return {}
        rows = self.world.gather_rows(sums).cpu()
        return {
            name if count == 1 else f"{name} (shard {shard} of {count})": {
                rank: int(rows[rank, place]) for rank in range(shard, self.world.size, count)
            }
            for place, (name, count) in enumerate(zip(tensors, shards, strict=True))
            for shard in range(count)
            if not is_alike[place, shard]
        }

    def _kept(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps, or what a synchronisation needs, by what they are of."""
        if self.strategy.has_local_weights:
            state = self.strategy.state_dict()
            return {f"{kind} of {name}": each for kind, tensors in state.items() for name, each in tensors.items()}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{kind} of {names.get(parameter, 'a parameter')}": value
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
            if isinstance(value, Tensor) and _has_replicas(value)
        }

    def _sums(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the bits of every tensor of this rank, shape [tensors], int64, on the device."""
        sums = [_sum_of_bits(own_rows(tensor)).to(self.world.device) for tensor in tensors.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.world.device)

    def _are_constant(self, sums: Tensor) -> Tensor:
        """Tell of each buffer whether it is on most ranks what it was at the beginning: bool, on the CPU. Collective."""
        return self.world.sum((sums == self._buffers_at_start).long()).cpu() * 2 > self.world.size


def _has_replicas(tensor: Tensor) -> bool:
    return not is_cut(tensor) or num_replicas(tensor) > 1


def _hash(facts: Mapping[str, str]) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()), dtype=torch.int64)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, each taken as an integer of its size; in int64, which wraps around."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
