"""Optimizers that can step the rows of a parameter alone."""

from __future__ import annotations

from torch.optim import Optimizer

from ddp_train.errors import ConfigError
from ddp_train.traits import needs_whole_matrices


def require_rows(optimizer: Optimizer, *, strategy: str) -> None:
    """Refuse an optimizer that needs whole matrices, or has a part that does: ranks have some of the rows each.

    Raises:
        ConfigError: it does.
    """
    parts: tuple[Optimizer, ...] = getattr(optimizer, "_parts", (optimizer,))
    for part in parts:
        if needs_whole_matrices(type(part)):
            raise ConfigError(
                key="optimizer",
                happened=f"is {type(part).__name__}, which needs whole matrices, and strategy={strategy} steps rows of them on each rank",
                expected="an optimizer that steps each number by itself (AdamW, SGD)",
                fix="optimizer=adamw, or strategy=ddp",
            )
