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
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.interfaces import is_cut

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 4  # tensors of each rank


class ReplicaError(RunError):
    """The ranks do not have the same weights any more."""


class ReplicaCheck:
    """Compares nothing."""

    def after_step(self, step: int) -> None:
        """Say that a step was taken."""

    def go_back(self) -> None:
        """Take note that the weights are those of an earlier step again."""

    def before_save(self, step: int) -> None:
        """Say that a checkpoint will be written."""


@dataclass
class FingerprintCheck(ReplicaCheck):
    """Compares what all ranks must have alike, now and then. Made on all of them, when the model is as it will be trained.

    Parameters are compared, the optimizer's tensors, and the buffers that training does not change. Those that it does (batch norm's
    averages) are each rank's own from one synchronised forward to the next, which begins with rank 0's; rank 0's are what is saved.
    Of what a strategy has cut among the ranks each has rows of its own: there is nothing to compare them with.
    """

    model: nn.Module  # what is trained, an objective with weights of its own included
    world: World
    _: KW_ONLY
    every_steps: int  # between two comparisons; each save has one before it besides, because every rank may write a part of it
    optimizer: Optimizer
    others: Callable[[], Mapping[str, str]]  # return a hash of each other thing that must be the same, by name

    def __post_init__(self) -> None:
        self._checked = -1  # the step after which it was done last
        self._parameters = {name: parameter for name, parameter in self.model.named_parameters() if not is_cut(parameter)}
        self._buffers = dict(self.model.named_buffers())
        self._buffers_at_start = self._sums(self._buffers)

    def after_step(self, step: int) -> None:
        """Compare if it is time. Collective."""
        if step % self.every_steps == 0:
            self._check(step)

    def go_back(self) -> None:
        self._checked = -1

    def before_save(self, step: int) -> None:
        """Compare, unless it has just been done. Collective."""
        if step != self._checked:
            self._check(step)

    def _check(self, step: int) -> None:
        """Compare.

        Raises:
            ReplicaError: on all ranks, with the rank and the tensor that differ.
        """
        self._checked = step
        kept = self._kept()
        facts = {"optimizer's tensors": hashlib.sha256(" ".join(kept).encode()).hexdigest(), **self.others()}
        columns: dict[str, list[Any]] = {}
        # What differs is asked first, in as few numbers for thousands of ranks as for two. Who has what is asked if something does.
        if not self.world.are_alike(_hash(facts)).all():
            every = self.world.gather(facts)
            columns = {name: [each.get(name) for each in every] for name in sorted({name for each in every for name in each})}
        if len(set(columns.get("optimizer's tensors", []))) <= 1:  # else their sums are not as many on each rank
            compared, sums = self._parameters | kept, self._sums(self._parameters | kept | self._buffers)
            is_alike = self.world.are_alike(sums)
            if self._buffers:
                is_alike[len(compared) :] |= ~self._are_constant(sums[len(compared) :])
            if not is_alike.all():
                rows = self.world.gather_rows(sums).cpu()
                names = [*compared, *self._buffers]
                columns |= {name: rows[:, place].tolist() for place, name in enumerate(names) if not is_alike[place]}
        different = {name: column for name, column in columns.items() if len(set(column)) > 1}
        if not different:
            return
        hosts = self.world.gather(socket.gethostname())
        drifted: dict[int, list[str]] = {}
        unclear = []
        for name, column in different.items():
            value, count = Counter(column).most_common(1)[0]
            if count * 2 <= self.world.size:
                unclear.append(name)
            for rank in [rank for rank in range(self.world.size) if column[rank] != value and count * 2 > self.world.size]:
                drifted.setdefault(rank, []).append(name)
        found = [f"rank {rank} on {hosts[rank]} differs from the others in {_some(names)}" for rank, names in sorted(drifted.items())]
        if unclear:
            found.append(f"the ranks differ in {_some(unclear)}, and no majority says which is right")
        raise ReplicaError(
            key="health.check_replicas_every_steps",
            happened=f"a corrupted replica, found after step {step}: {'; '.join(found)}",
            expected="the same weights, optimizer state and schedule on all ranks, bit for bit",
            fix="ddp-train resume RUN, which goes on from the newest checkpoint: nothing was saved since; if it is the same machine again,"
            " replace it (memory), or look for code that changes weights on one rank alone",
        )

    def _kept(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps, by what they are of."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}
        return {
            f"{kind} of {names.get(parameter, 'a parameter')}": value
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
            if isinstance(value, Tensor) and not is_cut(value)
        }

    def _sums(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the sum of the bits of every tensor of this rank, shape [tensors], int64, on the device."""
        sums = [_sum_of_bits(tensor.detach()).to(self.world.device) for tensor in tensors.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.world.device)

    def _are_constant(self, sums: Tensor) -> Tensor:
        """Tell of each buffer whether it is on most ranks what it was at the beginning: bool, on the CPU. Collective."""
        return self.world.sum((sums == self._buffers_at_start).long()).cpu() * 2 > self.world.size


def _hash(facts: Mapping[str, str]) -> Tensor:
    """Return a hash of all of it: int64, shape [4]."""
    return torch.frombuffer(bytearray(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()), dtype=torch.int64)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, each taken as an integer of its size; in int64, which wraps around."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
