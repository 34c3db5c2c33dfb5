"""Whether all ranks still have the same weights: they must, to the last bit, and a bit that flips on one of them is not seen otherwise.

Each rank adds up the bits of every tensor as integers, on its device, and one small gather brings the sums together.
"""

from __future__ import annotations

import socket
from collections import Counter

import torch
from torch import Tensor, nn

from ddp_train.distributed import World
from ddp_train.errors import RunError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 4  # tensors of each rank


class ReplicaError(RunError):
    """The ranks do not have the same weights any more."""


class ReplicaCheck:
    """Compares nothing."""

    def after(self, step: int) -> None:
        """Say that a step was taken."""

    def before_save(self, step: int) -> None:
        """Say that a checkpoint will be written."""


class FingerprintCheck(ReplicaCheck):
    """Compares the model of all ranks now and then. Made on all of them, when the model is as it will be trained.

    Parameters are compared, and the buffers that training does not change: those that it does (batch norm's averages) are each rank's own.

    Args:
        every_steps: steps between two comparisons; each save has one before it besides, because every rank may write a part of it.
    """

    def __init__(self, model: nn.Module, world: World, *, every_steps: int) -> None:
        self._world, self._every_steps = world, every_steps
        self._checked = -1  # the step after which it was done last
        self._parameters, self._buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self._buffers_at_start = self._gather(self._buffers)

    def after(self, step: int) -> None:
        """Compare if it is time. Collective."""
        if step % self._every_steps == 0:
            self._check(step)

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
        sums = self._gather(self._parameters | self._buffers)
        is_constant = (sums[:, len(self._parameters) :] == self._buffers_at_start).sum(dim=0) * 2 > self._world.size
        is_compared = torch.cat([torch.ones(len(self._parameters), dtype=torch.bool), is_constant])
        differs = (sums != sums[0]).any(dim=0) & is_compared
        if not differs.any():
            return
        hosts = self._world.gather(socket.gethostname())
        drifted: dict[int, list[str]] = {}
        unclear = []
        for place, name in enumerate([*self._parameters, *self._buffers]):
            if differs[place]:
                column = sums[:, place].tolist()
                value, count = Counter(column).most_common(1)[0]
                if count * 2 <= self._world.size:
                    unclear.append(name)
                for rank in [rank for rank in range(self._world.size) if column[rank] != value and count * 2 > self._world.size]:
                    drifted.setdefault(rank, []).append(name)
        found = [f"rank {rank} on {hosts[rank]} differs from the others in {_some(names)}" for rank, names in sorted(drifted.items())]
        if unclear:
            found.append(f"the ranks differ in {_some(unclear)}, and no majority says which is right")
        raise ReplicaError(
            key="trainer.check_replicas_every_steps",
            happened=f"a corrupted replica, found after step {step}: {'; '.join(found)}",
            expected="the same parameters on all ranks, bit for bit",
            fix="ddp-train resume RUN, which goes on from the newest checkpoint: nothing was saved since; if it is the same machine again,"
            " replace it (memory), or look for code that changes weights on one rank alone",
        )

    def _gather(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the sum of the bits of every tensor on every rank, shape [ranks, tensors], int64, on the CPU. Collective."""
        if not tensors:
            return torch.zeros(self._world.size, 0, dtype=torch.int64)
        return self._world.gather_rows(torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors.values()])).cpu()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, each taken as an integer of its size; in int64, which wraps around."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
