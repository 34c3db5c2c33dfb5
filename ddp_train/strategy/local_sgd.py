"""Ranks that take steps of their own, and put their weights together after every so many."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.interfaces.strategy import ExchangeClock, MemoryKey, RankMemory, Strategy, memory_key
from ddp_train.strategy.means import copy_tensors_from_main, means, wide
from ddp_train.traits import refuse_modes


class LocalSGD(Strategy):
    """Let each rank step its own copy of the model by its share of each global batch, and put the copies together now and then.

    A synchronisation takes the mean over the ranks of each weight's displacement since the last one. An outer optimizer, SGD with
    Nesterov's momentum (DiLoCo), steps by it from the weights that all had then. Buffers take the mean displacement as it is; those of
    whole numbers become rank 0's. The state of each rank's own optimizer stays with it. One rank alone takes its own.

    Args:
        every_steps: steps from one synchronisation to the next, at least 1; in those between, the ranks exchange nothing.
        outer_lr: rate of the outer optimizer, above 0; 1 without momentum: the weights become the mean of the ranks' weights.
        outer_momentum: of the outer optimizer, at least 0 and below 1.

    Source: Stich 2018, arXiv:1805.09767; with an outer optimizer Douillard et al. 2023, arXiv:2311.08105.
    """

    weights_are_per_rank = True
    exchange_is_timed = True  # nothing is exchanged within backward
    refuses_loss_scale = "with strategy=local_sgd each rank would skip steps by its own loss scale"
    argument_ranges: ClassVar = {"every_steps": {"min": 1}, "outer_lr": {"above": 0}, "outer_momentum": {"min": 0, "below": 1}}

    def __init__(self, *, every_steps: int = 20, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        self._every_steps, self._lr, self._momentum = every_steps, outer_lr, outer_momentum
        self.has_local_steps = every_steps > 1
        self._is_outer = outer_lr != 1 or outer_momentum > 0
        self._size, self._has_rank_0s_weights = 1, False
        self._trained_module = nn.Module()
        self._last: dict[str, Tensor] = {}  # values at the last synchronisation, by name; in float32 at least
        self._velocity: dict[str, Tensor] = {}  # of the outer optimizer
        self._is_mean, self.weights_are_equal = False, True
        self._clock = ExchangeClock()

    def prepare(self, model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
        model = model.to(device)
        if world_size > 1 and not self._has_rank_0s_weights:  # when called again, ranks have their own
            copy_tensors_from_main(chain(model.parameters(), model.buffers()))
        self._size, self._has_rank_0s_weights = world_size, True
        self._synchronises = world_size > 1 or self._is_outer
        return model

    def set_clock(self, clock: ExchangeClock) -> None:
        self._clock = clock

    def start_training(self, trained_module: nn.Module, state: Mapping[str, Any], *, weights_are_equal: bool) -> None:
        self._trained_module, self.weights_are_equal = trained_module, weights_are_equal
        if not self._synchronises:
            return
        last, velocity = state.get("last", {}), state.get("velocity", {})
        self._last = {name: _own_copy(last.get(name, wide(held)), held) for name, held in _averageable(trained_module).items()}
        if self._momentum:
            now = {name: self._last[name] for name, _ in trained_module.named_parameters()}
            self._velocity = {name: _own_copy(velocity.get(name, torch.zeros_like(value)), value) for name, value in now.items()}

    def after_step(self, step: int) -> None:
        is_time = step % self._every_steps == 0
        self.weights_are_equal = is_time or self._size == 1
        if is_time and self._synchronises:
            with self._clock.around():
                self._synchronise()

    @contextmanager
    def mean_over_ranks(self, trained_module: nn.Module, averages: Iterable[Tensor]) -> Iterator[Mapping[MemoryKey, Tensor]]:
        if self._size == 1 or self._is_mean:
            yield {}
            return
        averages = list(averages)
        changed = averages if self.weights_are_equal else [*trained_module.parameters(), *trained_module.buffers(), *averages]
        with torch.no_grad():
            kept = [(tensor.detach(), tensor.detach().clone()) for tensor in changed]
            if not self.weights_are_equal:
                held = _averageable(trained_module)
                for name, displacement in means(held, self._last):
                    held[name].copy_(self._last[name] + displacement)
                _copy_integers_from_main(trained_module.buffers())
            fractions = {number: average for number, average in enumerate(averages) if average.is_floating_point()}
            for number, mean in means(fractions):
                fractions[number].copy_(mean)
            _copy_integers_from_main(averages)
        self._is_mean = True
        yield {memory_key(tensor): copy for tensor, copy in kept}
        self._is_mean = False
        for tensor, copy in kept:
            tensor.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self._last), "velocity": dict(self._velocity)}

    def setup_optimizer(self, optimizer: Optimizer) -> Mapping[Tensor, Tensor]:
        """Let each rank step alone. What an optimizer keeps to evaluate other weights, no synchronisation would put together."""
        refuse_modes(optimizer, "which would differ between the ranks with strategy=local_sgd")
        return {}

    def rank_memory(self, trained_module: nn.Module, world_size: int) -> RankMemory:
        num_copies = 1 + bool(self._momentum) if self._is_outer or world_size > 1 else 0
        of_one = sum(max(4, tensor.itemsize) * tensor.numel() for tensor in chain(trained_module.parameters(), trained_module.buffers()))
        return RankMemory(exchange_bytes=num_copies * of_one)

    @torch.no_grad()
    def _synchronise(self) -> None:
        held = _averageable(self._trained_module)
        stepped = {name for name, parameter in self._trained_module.named_parameters() if parameter.requires_grad}
        for name, displacement in means(held, self._last):
            if name in stepped and self._is_outer:  # what is frozen has no displacement, and shall have no momentum
                if self._momentum:  # minus `displacement` is the gradient
                    displacement = displacement.add(self._velocity[name].mul_(self._momentum).add_(displacement), alpha=self._momentum)
                displacement = displacement.mul_(self._lr)
            held[name].copy_(self._last[name].add_(displacement))
        _copy_integers_from_main(self._trained_module.buffers())


def _averageable(trained_module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that have a mean, by name, sharing their memory: parameters, and buffers of fractions."""
    every = chain(trained_module.named_parameters(), trained_module.named_buffers())
    real = {name: torch.view_as_real(each.detach()) if each.is_complex() else each.detach() for name, each in every}
    return {name: each for name, each in real.items() if each.is_floating_point()}


def _copy_integers_from_main(tensors: Iterable[Tensor]) -> None:
    """Take rank 0's tensors of whole numbers, of which there is no mean. Collective."""
    copy_tensors_from_main(tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex()))


def _own_copy(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a tensor, or itself where it is no other's, on the device of another."""
    return tensor.to(like.device).clone() if tensor.data_ptr() == like.data_ptr() else tensor.to(like.device)
