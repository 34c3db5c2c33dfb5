"""One optimizer step of one rank: forward and backward of each micro-batch, the exact mean's gradient, clipping, the optimizer.

Nothing here waits for the device. No collective runs beside the strategy's own, but for one small all-reduce during the first forward where
the objective's weights depend on the batch's content, and one for the norm of gradients that are cut among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from ddp_train.distributed.world import World
from ddp_train.interfaces import Objective, as_pair, batch_size, note_size
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop import gradient
from ddp_train.training.loop.gradient import clip, total_norm
from ddp_train.training.loop.skip_nonfinite import StepGuard
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turn import Turn
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.train_state import TrainState


@dataclass(kw_only=True)
class TrainStep:
    """Takes optimizer steps. The state is read, and advanced by who calls.

    Args:
        steps_alone: the ranks may exchange nothing in a step.
        window: is told the losses and the weight of each step.
    """

    components: Components
    state: TrainState
    world: World
    clip_grad_norm: float | None
    guard: StepGuard
    steps_alone: bool
    window: LogWindow

    def __call__(self, micro_batches: Iterable[MicroBatch], *, global_batch_size: int, measures_norm: bool = False) -> Tensor | None:
        """Take one optimizer step over this rank's micro-batches of one global batch. Collective: every rank calls it.

        Gradients are exchanged as the strategy does it (DDP: once, in the last micro-batch's backward). They are the exact weighted mean
        over the global batch: every loss is a sum, divided by the weight of the whole batch.

        Args:
            micro_batches: as many as the loader's `micro_steps`, asked for one by one.

        Returns:
            Gradient norm before clipping, L2 over all parameters, shape [], not synchronised; None when it is neither measured nor clipped.

        Source: Li et al. 2020, arXiv:2006.15704 (DDP; skipping synchronisation while accumulating).
        """
        components, window = self.components, self.window
        window.begin_step()
        sum_over_ranks = _keep if self.steps_alone else self.world.start_sum
        total_weight, micro_batches = _start_total_weight(
            components.objective, micro_batches, global_batch_size, device=self.world.device, start_sum=sum_over_ranks
        )
        if components.turns:
            turns = components.turns_at(self.state.step)
            taken = [turn.name for turn in turns]
            grad_norm = self._take_turns(turns, [*micro_batches], total_weight, measures_norm=measures_norm)
        else:
            taken = []
            grad_norm = self._descend(micro_batches, total_weight, measures_norm=measures_norm)
        components.scheduler.step()
        if self.guard.needs_norm and grad_norm is not None:
            window.norms.append(grad_norm)
        window.end_step(total_weight(), samples=global_batch_size, turns=taken)
        return grad_norm

    def _take_turns(
        self, turns: list[Turn], micro_batches: list[MicroBatch], total_weight: Callable[[], float | Tensor], *, measures_norm: bool
    ) -> Tensor | None:
        """Let the turns of a step descend one after the other, each over all micro-batches. Return the norm over all of them."""
        grad_norm = None
        for turn in turns:
            with turn.alone():
                grad_norm = self._descend(micro_batches, total_weight, measures_norm=measures_norm, turn=turn, before=grad_norm)
        return grad_norm

    def _descend(
        self,
        micro_batches: Iterable[MicroBatch],
        total_weight: Callable[[], float | Tensor],
        *,
        measures_norm: bool,
        turn: Turn | None = None,
        before: Tensor | None = None,
    ) -> Tensor | None:
        """Let the optimizer step by the gradient of all micro-batches, and forget the gradient.

        Args:
            turn: whose loss and parameters; None: the objective takes no turns.
            before: the norm of the turns before this one. A step in which one was not finite takes no further turn (`guard`).
        """
        components, guard, early = self.components, self.guard, self.components.early_step
        module = components.module if turn is None else turn.module
        guard.begin()
        if early is not None:
            early.begin(measures_norm=measures_norm)
        last = components.train_loader.micro_steps(self.state.samples) - 1
        for number, micro_batch in enumerate(micro_batches):
            if number < last:
                with components.strategy.no_sync(module):
                    self._accumulate(micro_batch, total_weight, turn)
            else:  # this backward reduces the gradients
                self._accumulate(micro_batch, total_weight, turn)
        components.strategy.reduce(components.trained, self.state.step)
        grad_norm = None
        if early is not None:  # the optimizer has taken its step
            grad_norm = early.end(self.world)
        elif self.clip_grad_norm is not None or measures_norm or guard.needs_norm:
            # Before the optimizer's step, which may use the gradients' memory.
            components.scaler.unscale_(components.optimizer)
            gradients = [parameter.grad for parameter in components.module.parameters() if parameter.grad is not None]
            grad_norm = total_norm(gradients, self.world)
            if self.clip_grad_norm is not None:
                clip(gradients, self.clip_grad_norm, grad_norm)
        if before is not None and grad_norm is not None:
            grad_norm = torch.hypot(before, grad_norm)
        if early is None:
            guard.step(components.optimizer, components.scaler, grad_norm, turn="" if turn is None else turn.name)
            components.scaler.update()
        components.zero_gradients()
        return grad_norm

    def _accumulate(self, micro_batch: MicroBatch, total_weight: Callable[[], float | Tensor], turn: Turn | None) -> None:
        """Run one micro-batch forward and backward, adding to the gradients and to the window's loss."""
        components, world = self.components, self.world
        batch = batch_on(world.device, micro_batch)
        with components.amp.autocast(world.device):
            loss_sum = components.loss(batch, turn)
        if not micro_batch.counts:
            loss_sum = loss_sum * 0.0
        weight = total_weight()  # not needed before
        divisor = torch.where(weight == 0, 1.0, weight) if isinstance(weight, Tensor) else weight  # 0: nothing counts
        ranks = 1 if self.steps_alone and isinstance(weight, Tensor) else world.size  # whose weight it is
        scale = ranks / divisor  # DDP takes the mean over the ranks; the sum is wanted
        # Backward begins with the scale: the gradients are those of a loss times the scale, without that product and its own backward.
        seed = scale.to(loss_sum.dtype) if isinstance(scale, Tensor) else torch.full_like(loss_sum, scale)
        gradient.backward(loss_sum, components.scaler.scale(self.guard.mark(seed, loss_sum)))
        self.window.add(loss_sum, turn=None if turn is None else turn.name)


def _start_total_weight(
    objective: Objective,
    micro_batches: Iterable[MicroBatch],
    global_batch_size: int,
    *,
    device: torch.device,
    start_sum: Callable[[Tensor], Callable[[], Tensor]],
) -> tuple[Callable[[], float | Tensor], Iterable[MicroBatch]]:
    """Return what gives the weight of the whole global batch, and the micro-batches.

    The weight is known from the shapes of the first one; or it is that of all of them, being summed over the ranks meanwhile.
    """
    rest = iter(micro_batches)
    first = next(rest)
    weight = _weight(objective, first)
    if isinstance(weight, int):
        known = weight * first.pieces / (first.samples or batch_size(first.batch)) * global_batch_size
        return lambda: known, one_by_one([first], rest)
    every = [first, *rest]
    weights = [torch.as_tensor(_weight(objective, each), dtype=torch.float64) * each.counts for each in every]
    wait = start_sum(torch.stack(weights).sum())  # reduced where the data is, mostly on the CPU: no wait for the device
    return cache(lambda: wait().to(device, non_blocking=True)), every


def _weight(objective: Objective, micro_batch: MicroBatch) -> int | Tensor:
    """Return the weight of a micro-batch where it is: on the host, if it was not copied ahead."""
    return objective.weight(note_size(as_pair(micro_batch.batch), micro_batch.samples))


def _keep(weight: Tensor) -> Callable[[], Tensor]:
    """Return a rank's weight as its own: it asks nobody for the others', and takes the mean over its own units."""
    return lambda: weight


def one_by_one(first: list[MicroBatch], rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield all of them, and keep none: given the list itself, `chain` would hold its memory to the end."""
    return chain(iter(first), rest)
