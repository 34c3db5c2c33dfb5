"""Optimizers that can step the rows of a parameter alone."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ddp_train.errors import ConfigError

_WHOLE = ("Muon", "Adafactor", "LBFGS", "SOAP", "Shampoo", "LAMB", "LARS")


def require_rows(optimizer: Optimizer, *, strategy: str) -> None:
    """Refuse an optimizer whose update of a number depends on other rows of its parameter: ranks have some of the rows each.

    Raises:
        ConfigError: it is known to be one.
    """
    parts: tuple[Optimizer, ...] = getattr(optimizer, "_parts", (optimizer,))
    for part in parts:
        if isinstance(part, (torch.optim.Muon, torch.optim.LBFGS)) or type(part).__name__ in _WHOLE:
            raise ConfigError(
                key="optimizer",
                happened=f"is {type(part).__name__}, which needs whole matrices, and strategy={strategy} steps rows of them on each rank",
                expected="an optimizer that steps each number by itself (AdamW, SGD)",
                fix="optimizer=adamw, or strategy=ddp",
            )
