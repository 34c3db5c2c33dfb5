"""Other kinds of step than the plain one: parts of an objective take turns; or the optimizer steps within backward."""

from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop.train_step import NormShare, TrainStep, norm_of, norm_share
from ddp_train.training.parts.turns import without_gradients_for


class TurnsStep(TrainStep):
    """A step of several turns, one after the other, each over all micro-batches."""

    def update_parameters(self, micro_batches: Iterable[MicroBatch], global_batch_size: int, *, measures_norm: bool) -> Tensor | None:
        """Return the norm over all turns. A step in which one was not finite takes no further turn (`guard`)."""
        components, all_batches = self.components, [*micro_batches]
        turns = components.turns_at(self.state.step)
        self.window.begin_turns(turn.name for turn in turns if turn.name is not None)
        norm: Tensor | None = None
        for turn in turns:
            with without_gradients_for(turn.others):
                self.guard.begin()
                self.compute_gradients(all_batches, global_batch_size, turn)
                norm = self.step_optimizer(norm, measures_norm=measures_norm, turn=turn.name)
        return norm


class EarlyStep(TrainStep):
    """The optimizer steps within backward: each parameter as soon as its gradient is complete, which is then freed.

    So only a few gradients are in memory at a time. This needs gradients that are complete within backward: one micro-batch a step, and one
    process, or shards that are reduced within backward (fsdp). DDP's buckets hold all gradients anyway, and are exchanged after backward.

    The run's own optimizer gets one parameter at a time; it must update each number by itself, as torch's optimizers do. In any other
    backward, gradients are accumulated as usual.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer = self.components.optimizer
        groups = self._optimizer.param_groups
        self._order = {parameter: number for number, parameter in enumerate(chain.from_iterable(group["params"] for group in groups))}
        self._is_stepping = self._measures = False
        self._shares: dict[int, NormShare] = {}  # of the norm, by the parameters' numbers
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._step, index))

    def update_parameters(self, micro_batches: Iterable[MicroBatch], global_batch_size: int, *, measures_norm: bool) -> Tensor | None:
        """Return the norm of the gradients. Collective where some are sharded."""
        num_known = len(self._optimizer.state)  # parameters with a state from earlier steps
        self._is_stepping, self._measures = True, measures_norm
        self.compute_gradients(micro_batches, global_batch_size, self.components.turns.plain)
        shares, self._shares, self._is_stepping = self._shares, {}, False
        self._sort_state(num_known)
        norm = norm_of([shares[number] for number in sorted(shares)], self.world) if measures_norm else None
        self.components.zero_gradients()
        return norm

    def _step(self, index: int, parameter: Tensor) -> None:
        """Step one parameter of a group. The group goes by its index: a checkpoint may have replaced it."""
        optimizer, gradient = self._optimizer, parameter.grad
        if not self._is_stepping or gradient is None:
            return
        if self._measures:
            share = norm_share(gradient)
            self._shares[self._order[parameter]] = share._replace(tensor=torch.linalg.vector_norm(share.tensor))
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[index], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def _sort_state(self, num_known: int) -> None:
        """Sort the new entries of the optimizer's state by its parameters, as after any other step; backward has another order."""
        state = self._optimizer.state
        if len(state) == num_known:
            return
        known = list(state.items())
        added = sorted(known[num_known:], key=lambda item: self._order[item[0]])
        state.clear()
        state.update(known[:num_known] + added)
