"""A model without values (torch's meta device), for a rank that takes rank 0's.

A strategy that cuts the model among the ranks takes rank 0's values, block by block. If each rank of a machine made a model with values,
all of them would be in the host's memory before any is cut.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def has_values(model: nn.Module) -> bool:
    """Tell whether no parameter or buffer of a model is on the meta device."""
    return not any(tensor.is_meta for tensor in _own(model))


def make_without_values(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model whose parameters and buffers have no values; None: it would be another model than one with them.

    It would where its constructor reads a value, draws random numbers on a device that it names, or keeps a tensor that stays empty,
    for it is neither parameter nor buffer.
    """
    before = _meta_tensors()
    try:
        with torch.device("meta"):
            model = make()
        own = {id(tensor) for tensor in _own(model)}
        drawn = torch.get_rng_state()
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        if not torch.equal(drawn, torch.get_rng_state()):
            raise ValueError("its constructor draws numbers of its own")
        if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
            raise ValueError("it has parameters of a class of their own")
        gc.collect()
        if not _meta_tensors().keys() <= before.keys() | own:
            raise ValueError("it keeps tensors that are neither parameters nor buffers")
    except Exception as error:
        logger.info("the model is made with values on this rank, too: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        return None
    return model


def _own(model: nn.Module) -> list[Tensor]:
    return list(chain(model.parameters(), model.buffers()))


def _meta_tensors() -> dict[int, Tensor]:
    """Return all tensors of this process that have no values, by their identities, which last as long as the result."""
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta}
