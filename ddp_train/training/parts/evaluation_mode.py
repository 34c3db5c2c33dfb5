"""Optimizers that train other weights than those to evaluate and to save: schedule-free ones (Defazio et al. 2024, arXiv:2405.15682).

They say so by two methods, `train()` and `eval()`, which change the parameters in place. The way there and back rounds, so that a run that
was saved once more would differ in the last bits; the trained weights are kept meanwhile, and a checkpoint holds both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.traits import has_modes


@contextmanager
def evaluation_mode(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Let the parameters be those to evaluate and to save; afterwards they are those that are trained again, to the bit.

    Yields:
        The trained ones, in the order of the optimizer's groups; none where both are the same. An error inside ends the run.
    """
    if not has_modes(optimizer):
        yield []
        return
    kept = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    modes: Any = optimizer
    modes.eval()
    yield kept
    training_mode(optimizer, kept)


def training_mode(optimizer: Optimizer, trained: Sequence[Tensor] = ()) -> None:
    """Let the parameters be those that are trained.

    Args:
        trained: their values, as `evaluation_mode` yields them; none: the optimizer finds them.
    """
    if not has_modes(optimizer):
        return
    modes: Any = optimizer
    modes.train()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for parameter, value in zip(parameters, trained, strict=bool(trained)):
            parameter.copy_(value)
