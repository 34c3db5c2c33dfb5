"""An exponential moving average of the weights, which is often better than the weights themselves."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_train.interfaces import Callback, Run
from ddp_train.interfaces.strategy import local_rows, shard_like


class EMA(Callback):
    """Averages the parameters of the model, and the running averages of its batch norms. Nothing waits for the device.

    After the n-th update the decay is `decay`, at first (1 + n) / (10 + n): the first weights are soon forgotten.
    Weights in half precision are averaged in float32.

    Args:
        decay: weight of the average so far, between 0 and 1: 0.999 averages over some 1,000 updates.
        every_steps: steps between two updates.
        for_evaluation: evaluate the averages instead of the weights. All metrics, predictions and exports are then of the averages.

    Source: Polyak & Juditsky 1992; the warm-up as in TensorFlow's ExponentialMovingAverage with `num_updates`.
    """

    argument_ranges: ClassVar = {"decay": {"above": 0, "below": 1}, "every_steps": {"min": 1}}

    def __init__(self, decay: float = 0.999, *, every_steps: int = 1, for_evaluation: bool = True) -> None:
        self._decay, self._every_steps, self._for_evaluation = decay, every_steps, for_evaluation
        self._averages: dict[str, Tensor] = {}
        self._live: list[Tensor] = []  # the model's own tensors, in the same order
        self._num_updates = 0

    def on_start(self, run: Run) -> None:
        live = dict(_averaged(run.model))
        if self._averages and self._averages.keys() != live.keys():
            raise ValueError("the averages in the checkpoint are of another model")
        self._averages = {
            name: shard_like(self._averages[name].to(tensor.device), tensor) if self._averages else _wide(tensor.detach()).clone()
            for name, tensor in live.items()
        }
        self._live = list(live.values())

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        if run.step % self._every_steps:
            return
        self._num_updates += 1
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        averages = [local_rows(average) for average in self._averages.values()]
        torch._foreach_lerp_(averages, [_wide(local_rows(tensor)) for tensor in self._live], 1 - decay)

    def evaluation_weights(self) -> Mapping[str, Tensor] | None:
        return self._averages if self._for_evaluation and self._averages else None

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_updates, self._averages = state["num_updates"], dict(state["averages"])


def _averaged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, and the running averages of its batch norms, by name. Other buffers are no averages."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if buffer.is_floating_point():
                    yield name, buffer


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
