"""Check that all ranks still have the same weights, to the last bit: nothing else notices a bit that flips on one rank.

Each rank adds up the bits of every tensor as integers, on its device; the smallest and the largest sum of all ranks must be equal. The rest
(schedule, loss scale, position) is compared by hashes. Where something differs, all ranks' sums are gathered.
"""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.checkpoint import codec
from ddp_train.distributed.world import World
from ddp_train.errors import RunError, join_few
from ddp_train.interfaces.strategy import Strategy, is_sharded, local_rows, num_replicas, num_shards
from ddp_train.training.parts.components import Components
from ddp_train.training.train_state import TrainState

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_OPTIMIZER = "optimizer's tensors"
_ABSENT = torch.iinfo(torch.int64).max  # of a shard that this rank does not have: never the smallest


class ReplicaError(RunError):
    """The ranks do not have the same weights any more."""


@dataclass(kw_only=True)
class ReplicaCheck:
    """Compares, now and then, the state that must be the same on all ranks. Created on all ranks, when the model is ready to train.

    Parameters are compared, the optimizer's tensors, and the buffers that training does not change. Buffers that it changes (batch norm's
    averages) differ between two synchronised forwards, which begin with rank 0's buffers; rank 0's are saved.
    Of tensors that a strategy has sharded among the ranks, shards are compared that several ranks have.
    Where ranks take steps of their own, they are compared after a synchronisation, by its state instead of their optimizers.
    """

    model: nn.Module  # what is trained, an objective with weights of its own included
    world: World
    every_steps: int  # between two comparisons; there is also one before each save, because every rank may write a part of it
    optimizer: Optimizer
    others: Callable[[], Mapping[str, str]]  # return hashes of all other things that must be the same, by name
    strategy: Strategy

    def __post_init__(self) -> None:
        self._last_checked = -1  # step
        self._is_due = False
        self._parameters = {name: parameter for name, parameter in self.model.named_parameters() if _has_replicas(parameter)}
        self._buffers = dict(self.model.named_buffers())
        self._buffers_at_start = self._sums(self._buffers)

    def after_step(self, step: int) -> None:
        """Compare if a comparison is due. Collective."""
        if step <= self._last_checked:  # after a rewind
            self._last_checked = -1
        self._is_due |= step % self.every_steps == 0
        if self._is_due:
            self._compare(step)

    def before_save(self, step: int) -> None:
        """Compare, unless this step was compared. Collective."""
        if step != self._last_checked:
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Compare. Raises ReplicaError, on all ranks: it names the rank and the tensor that differ."""
        if not self.strategy.weights_are_equal:
            return  # after the next synchronisation
        self._last_checked, self._is_due = step, False
        optimizer_tensors = self._optimizer_tensors()
        facts = {_OF_OPTIMIZER: hashlib.sha256(" ".join(optimizer_tensors).encode()).hexdigest(), **self.others()}
        different: dict[str, dict[int, Any]] = {}  # name -> rank -> its value
        # First only whether anything differs: that takes as few numbers for thousands of ranks as for two. The ranks' values only then.
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        if not self.world.are_alike(torch.frombuffer(bytearray(digest), dtype=torch.int64)).all():
            by_rank = self.world.gather(facts)
            columns = {name: {rank: own.get(name) for rank, own in enumerate(by_rank)} for name in sorted(set().union(*by_rank))}
            different = {name: column for name, column in columns.items() if len(set(column.values())) > 1}
        if _OF_OPTIMIZER not in different:  # else ranks have different numbers of tensors
            different |= self._different({**self._parameters, **optimizer_tensors, **self._buffers})
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
            for rank in [rank for rank, own in column.items() if own != value]:
                drifted.setdefault(rank, []).append(name)
        problems = [f"rank {rank} on {hosts[rank]} differs from the others in {join_few(names)}" for rank, names in sorted(drifted.items())]
        if unclear:
            problems.append(f"the ranks differ in {join_few(unclear)}, and no majority says which is right")
        raise ReplicaError(
            key="health.check_replicas_every_steps",
            happened=f"a corrupted replica, found after step {step}: {'; '.join(problems)}",
            expected="the same weights, optimizer state and schedule on all ranks, bit for bit",
            fix="ddp-train resume RUN, which continues from the newest checkpoint; nothing was saved since. If the machine fails again,"
            " replace it (memory), or look for code that changes weights on one rank only",
        )

    def _different(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
        """Return the ranks' sums of those tensors (buffers last) whose replicas differ; buffers may change. Collective."""
        if not tensors:
            return {}
        sums, rows = self._sums(tensors), torch.arange(len(tensors))
        shards = [num_shards(tensor) for tensor in tensors.values()]
        own_shards = torch.tensor([self.world.rank % count for count in shards])  # the shard of each tensor that this rank has
        both = torch.full([2, len(tensors), max(shards)], _ABSENT, device=sums.device)
        both[0, rows, own_shards], both[1, rows, own_shards] = sums, ~sums  # the smallest inverted sum is the inverse of the largest sum
        lowest, highest = self.world.lowest(both).cpu()
        is_alike = (lowest == ~highest) | (lowest == _ABSENT)
        if self._buffers:
            first = len(tensors) - len(self._buffers)
            num_constant = self.world.sum((sums[first:] == self._buffers_at_start).long()).cpu()  # ranks that still have its first value
            is_alike[first:, 0] |= num_constant * 2 <= self.world.size
        if is_alike.all():
            return {}
        by_rank = self.world.gather_rows(sums).cpu()
        return {
            name if count == 1 else f"{name} (shard {shard} of {count})": {
                rank: int(by_rank[rank, row]) for rank in range(shard, self.world.size, count)
            }
            for row, (name, count) in enumerate(zip(tensors, shards, strict=True))
            for shard in range(count)
            if not is_alike[row, shard]
        }

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps, or a synchronisation, by kind and parameter."""
        if self.strategy.weights_are_per_rank:
            kinds = self.strategy.state_dict().items()
            return {f"{kind} of {name}": tensor for kind, tensors in kinds for name, tensor in tensors.items()}
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{kind} of {names.get(parameter, 'a parameter')}": value
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
            if isinstance(value, Tensor) and _has_replicas(value)
        }

    def _sums(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the bits of every tensor of this rank, shape [tensors], int64, on the device."""
        sums = [_sum_of_bits(local_rows(tensor)).to(self.world.device) for tensor in tensors.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.world.device)


def hashes_of_rest(components: Components, state: TrainState) -> dict[str, str]:
    """Return a hash of each small part of a run's state that all ranks should have alike: no collective keeps them the same."""
    parts = {"scheduler": components.scheduler.state_dict(), "scaler": components.scaler.state_dict(), "state": state.state_dict()}
    hashes = {}
    for name, part in parts.items():
        plain, tensors = codec.encode(part, name)
        values = [tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
        hashes[name] = hashlib.sha256(b"".join([json.dumps(plain, sort_keys=True).encode(), *values])).hexdigest()
    return hashes


def _has_replicas(tensor: Tensor) -> bool:
    return not is_sharded(tensor) or num_replicas(tensor) > 1


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, each taken as an integer of its size; in int64, which wraps around."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
