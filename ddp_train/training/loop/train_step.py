"""One optimizer step of one rank: forward and backward of each micro-batch, the exact mean's gradient, clipping, the optimizer.

Nothing here waits for the device. No collective runs but the strategy's own, one or two small all-reduces where the number of units
depends on the batch's content, and one for the norm of gradients that are sharded among the ranks.
Other kinds of step are in `other_steps.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.world import World
from ddp_train.interfaces import draw
from ddp_train.interfaces.batch import batch_size
from ddp_train.interfaces.strategy import is_sharded, local_rows, num_replicas
from ddp_train.loader.device_copy import batch_on
from ddp_train.loader.reader import MicroBatch
from ddp_train.system.phase import Part
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.turns import Turn
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.train_state import TrainState

_engine_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)  # private (torch_internals.py)
_EPS = 1e-6  # as in torch's own clipping
_FORWARD, _BACKWARD = Part.FORWARD, Part.BACKWARD  # looked up once: 60 ns each
_COMMUNICATION, _OPTIMIZER = Part.COMMUNICATION, Part.OPTIMIZER


class GlobalUnits:
    """The number of units (samples, tokens) that the losses of a step are over: of its global batch, by which the gradient is divided.

    An int of the first micro-batch tells it: each sample has as many. Other numbers are added up, over ranks and micro-batches. What the
    later micro-batches have is not known while the first one's backward runs: gradients are divided by an estimate, and corrected once.

    Args:
        is_per_rank: each rank takes a step of its own, by its own units.
    """

    def __init__(self, world: World, *, is_per_rank: bool, global_batch_size: int, num_micro_batches: int) -> None:
        self._world, self._is_per_rank = world, is_per_rank
        self._global_batch_size, self._num_micro_batches = global_batch_size, num_micro_batches
        self._counted: Tensor | None = None  # on this rank, of units that are not an int
        self.total: float | Tensor = 0.0
        self.factor: float | Tensor = 0.0  # of the losses, in the step's gradient: the strategy takes the ranks' mean, the sum is wanted

    def add(self, micro_batch: MicroBatch, num_units: int | Tensor) -> None:
        """Count a micro-batch. Collective for the first one of a step."""
        if isinstance(num_units, int):
            if not self.total:
                num_samples = micro_batch.num_samples or batch_size(micro_batch.batch)
                self.total = num_units * micro_batch.pieces / num_samples * self._global_batch_size
                self.factor = self._world.size / self.total
            return
        counted = num_units.double() * (not micro_batch.is_stand_in)
        if self._counted is None:
            self._counted = counted
            self.factor = self._factor_of(counted) / self._num_micro_batches
        else:
            self._counted = self._counted + counted

    def correction(self) -> Tensor | None:
        """Return what the gradients are to be multiplied by after the last micro-batch; None: nothing. Collective."""
        if self._counted is None or self._num_micro_batches == 1:
            return None
        return self._factor_of(self._counted) / self.factor

    def _factor_of(self, counted: Tensor) -> Tensor:
        self.total = counted if self._is_per_rank else self._world.sum(counted.clone())
        return (1 if self._is_per_rank else self._world.size) / torch.where(self.total == 0, 1.0, self.total)  # 0: nothing counts


class StepGuard:
    """Lets the optimizer take every step; `SkippingGuard` is the other one."""

    skips_steps = False  # leaves some out, which a record counts
    needs_norm = False  # of every step's gradient

    def begin(self) -> None:
        """Called before the first forward of a step."""

    def spread_nonfinite(self, factor: Tensor, loss: Tensor) -> Tensor:
        """Return the gradient that backward begins with: `factor`, or another one that marks a bad loss; all of shape []."""
        return factor

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor | None, *, turn: str | None = None) -> None:
        """Let the optimizer step; with `needs_norm`, after unscaling. The gradients are those of `turn`."""
        scaler.step(optimizer)


Mark = Callable[[Part], AbstractContextManager[object]]
"""Returns a context around a part of a step."""


class StepMarks:
    """Tells its listeners of the parts of a step: the time's split always, the profiler while it records."""

    def __init__(self) -> None:
        self._listeners: list[Mark] = []
        self.around: Mark = nullcontext  # a single listener itself: no call is between it and the step

    def listen(self, listener: Mark) -> None:
        """Be within a context of `listener`, too, in each part from now on; within those that listen already."""
        self._set_listeners([*self._listeners, listener])

    def forget(self, listener: Mark) -> None:
        self._set_listeners([other for other in self._listeners if other != listener])

    def _set_listeners(self, listeners: list[Mark]) -> None:
        self._listeners = listeners
        self.around = listeners[0] if len(listeners) == 1 else self._around_all if listeners else nullcontext

    @contextmanager
    def _around_all(self, part: Part) -> Iterator[None]:
        with ExitStack() as contexts:
            for listener in self._listeners:
                contexts.enter_context(listener(part))
            yield


@dataclass(kw_only=True)
class TrainStep:
    """Takes optimizer steps. The state is read, and advanced by the caller."""

    components: Components
    state: TrainState
    world: World
    clip_grad_norm: float | None = None
    guard: StepGuard = field(default_factory=StepGuard)  # decides whether the optimizer steps
    marks: StepMarks = field(default_factory=StepMarks)
    window: LogWindow = field(init=False)  # gets the losses and the number of units of each step
    num_units: float | Tensor = field(init=False, default=0.0)  # of the newest step's global batch

    def __post_init__(self) -> None:
        self.has_local_steps = self.components.strategy.has_local_steps  # each rank takes its own
        per_rank = self.has_local_steps or self.world.size == 1
        self.window = LogWindow(self.world.device, turns=self.components.turns.by_name, units_are_per_rank=per_rank)

    def __call__(self, micro_batches: Iterable[MicroBatch], *, global_batch_size: int, measures_norm: bool = False) -> Tensor | None:
        """Take one optimizer step over this rank's micro-batches of one global batch. Collective: every rank calls it.

        Gradients are exchanged as the strategy does it (DDP: once, in the last micro-batch's backward). They are the exact weighted mean
        over the global batch: every loss is a sum, divided by the number of units in the whole batch.

        `micro_batches`: as many as the loader's `num_micro_batches`, asked for one by one.

        Returns:
            Gradient norm before clipping, L2 over all parameters, shape [], not synchronised; None when it is neither measured nor clipped.

        Source: Li et al. 2020, arXiv:2006.15704 (DDP; skipping synchronisation while accumulating).
        """
        window = self.window
        window.begin_step()
        grad_norm = self.update_parameters(micro_batches, global_batch_size, measures_norm=measures_norm)
        self.components.scheduler.step()
        window.end_step(self.num_units, samples=global_batch_size, norm=grad_norm if self.guard.needs_norm else None)
        return grad_norm

    def update_parameters(self, micro_batches: Iterable[MicroBatch], global_batch_size: int, *, measures_norm: bool) -> Tensor | None:
        """Compute the gradients of all micro-batches, let the optimizer step, and forget them; return their norm where it is wanted."""
        self.guard.begin()
        self.compute_gradients(micro_batches, global_batch_size, self.components.turns.plain)
        return self.step_optimizer(measures_norm=measures_norm)

    def step_optimizer(self, norm: Tensor | None = None, *, measures_norm: bool, turn: str | None = None) -> Tensor | None:
        """Clip the gradients, step by them and forget them; return their norm where it is wanted, together with that of earlier turns."""
        components = self.components
        with self.marks.around(_OPTIMIZER):
            grad_norm = self.measure_and_clip(measures_norm=measures_norm)
            norm = grad_norm if norm is None or grad_norm is None else torch.hypot(norm, grad_norm)
            self.guard.step(components.optimizer, components.scaler, norm, turn=turn)
            components.scaler.update()
            components.zero_gradients()
        return norm

    def compute_gradients(self, micro_batches: Iterable[MicroBatch], global_batch_size: int, turn: Turn) -> None:
        """Run all micro-batches of a turn forward and backward; the last backward reduces the gradients."""
        components = self.components
        num_micro_batches = components.train_loader.num_micro_batches(self.state.position)
        units = GlobalUnits(
            self.world, is_per_rank=self.has_local_steps, global_batch_size=global_batch_size, num_micro_batches=num_micro_batches
        )
        last = num_micro_batches - 1
        for number, micro_batch in enumerate(micro_batches):
            if number < last:
                with components.strategy.no_sync(turn.wrapped):
                    self._forward_backward(number, micro_batch, units, turn)
            else:
                self._forward_backward(number, micro_batch, units, turn)
        with self.marks.around(_COMMUNICATION):
            components.strategy.reduce_gradients(components.trained_module, self.state.step)
            factor = units.correction()
        if factor is not None:
            scale(self._gradients(), factor)
        self.num_units = units.total

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.components.trained_module.parameters() if parameter.grad is not None]

    def measure_and_clip(self, *, measures_norm: bool) -> Tensor | None:
        """Return the norm of the gradients where it is wanted, and clip them by it."""
        components = self.components
        if self.clip_grad_norm is None and not measures_norm and not self.guard.needs_norm:
            return None
        # Before the optimizer's step, which may use the gradients' memory.
        components.scaler.unscale_(components.optimizer)
        gradients = self._gradients()
        grad_norm = total_norm(gradients, self.world)
        if self.clip_grad_norm is not None:
            clip(gradients, self.clip_grad_norm, grad_norm)
        return grad_norm

    def _forward_backward(self, number: int, micro_batch: MicroBatch, units: GlobalUnits, turn: Turn) -> None:
        """Run one micro-batch forward and backward, adding to the gradients and to the window's loss."""
        components, world = self.components, self.world
        place = partial(components.train_loader.place, self.state.position, number)
        with (
            batch_on(world.device, micro_batch) as batch,
            draw.Source(components.seed, place, batch, world.device, pieces=micro_batch.pieces),
            components.amp.autocast(world.device),
            self.marks.around(_FORWARD),
        ):
            loss, num_units, times = components.loss(batch, turn)
        if micro_batch.is_stand_in:
            times = 0
        with self.marks.around(_COMMUNICATION):
            units.add(micro_batch, num_units)
        # Backward begins with this factor: the gradients are those of the loss times the factor, without that product and its own backward.
        begin = units.factor * times
        factor = begin.to(loss.dtype) if isinstance(begin, Tensor) else torch.full_like(loss, begin)
        factor = components.scaler.scale(self.guard.spread_nonfinite(factor, loss))
        with self.marks.around(_BACKWARD):
            backward(loss, factor)
        self.window.add(loss, times, turn=turn.name)


def backward(loss: Tensor, grad_output: Tensor) -> None:
    """Add the gradients of a loss, shape [], to the parameters', as `loss.backward(grad_output)` does; the tensors differ in value alone.

    `loss.backward` compares the two shapes with the compiler's code: it imports sympy before the first step, and takes 15 us.
    """
    if type(loss) is Tensor and _engine_run_backward is not None:
        _engine_run_backward((loss,), (grad_output,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:  # a subclass of Tensor may do more
        loss.backward(grad_output)


class NormShare(NamedTuple):
    """The share of this rank's part of a gradient in the norm."""

    tensor: Tensor  # its rows here, or their norm
    replicas: int  # ranks that have the same rows; 0: the gradient is not sharded, and all ranks have it


def norm_share(gradient: Tensor) -> NormShare:
    return NormShare(local_rows(gradient), num_replicas(gradient) if is_sharded(gradient) else 0)


def total_norm(gradients: Sequence[Tensor], world: World) -> Tensor:
    """Return the L2 norm over all gradients, shape [], the same on all ranks. Collective where some are sharded: one small all-reduce."""
    return norm_of([norm_share(gradient) for gradient in gradients], world)


def norm_of(shares: Sequence[NormShare], world: World) -> Tensor:
    """Return the L2 norm over all shares, as `total_norm`."""
    unsharded = [share.tensor for share in shares if not share.replicas]
    if len(unsharded) == len(shares):
        return nn.utils.get_total_norm(unsharded)
    # In float64: a square overflows float32 long before the norm does.
    squares = torch.zeros((), dtype=torch.float64, device=world.device)
    for replicas in {share.replicas for share in shares if share.replicas}:
        rows = [share.tensor for share in shares if share.replicas == replicas]
        squares += nn.utils.get_total_norm(rows).to(squares).square() / replicas
    squares = world.sum(squares)
    if unsharded:
        squares = squares + nn.utils.get_total_norm(unsharded).to(squares).square()
    return squares.sqrt().float()


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients down where their norm is above `max_norm`. Nothing waits for the device."""
    scale(gradients, torch.clamp(max_norm / (norm + _EPS), max=1.0))


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a number, shape []. Nothing waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        rows = local_rows(gradient)
        groups.setdefault((rows.device, rows.dtype), []).append(rows)
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, factor.to(device))
