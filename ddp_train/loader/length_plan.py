"""How long the windows of tokens are at each step: whole ones, or cut into pieces of the same length.

A window stays the sample that it is: its pieces are rows of the same micro-batch. So the order of the data, the size of a global batch, its
tokens and what a resume needs know nothing of lengths.
Shapes: B windows, T tokens of one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ddp_train.errors import DataError
from ddp_train.interfaces import describe, map_tensors
from ddp_train.loader.reader import MicroBatch


class LengthPlan:
    """A length for each step: a function of its number alone.

    Args:
        whole: T, which every length divides.
        changes: from which step on, counted from 0, pieces have which length, ascending; before the first one windows are whole.
    """

    def __init__(self, whole: int, changes: Sequence[tuple[int, int]]) -> None:
        self.whole = whole
        self._steps = [step for step, _ in changes]
        self._lengths = [whole, *(length for _, length in changes)]

    def at(self, step: int) -> int:
        """Return the length in the step that comes after `step` steps."""
        return self._lengths[bisect_right(self._steps, step)]

    def cut(self, micro_batch: MicroBatch, step: int) -> MicroBatch:
        """Return a micro-batch as the step that comes after `step` steps has it: [B, T] becomes [B * pieces, length], without a copy."""
        change = partial(self._pieces, length=self.at(step), micro_batch=micro_batch)
        placed = None if micro_batch.placed is None else map_tensors(change, micro_batch.placed)
        return micro_batch._replace(batch=map_tensors(change, micro_batch.batch), placed=placed, pieces=self.whole // self.at(step))

    def _pieces(self, tensor: Tensor, *, length: int, micro_batch: MicroBatch) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != self.whole:
            raise DataError(
                key="trainer.length_schedule",
                happened=f"is given, and a batch is {describe(micro_batch.batch)}",
                expected=f"whole windows of {self.whole} tokens alone, [B, {self.whole}]",
                fix="trainer.length_schedule=null",
            )
        return tensor.reshape(-1, length, *tensor.shape[2:])
