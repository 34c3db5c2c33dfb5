"""Optimizers that need whole matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.optimizer.parts import Several
from ddp_train.strategy.rows import require_rows


class Slow(torch.optim.Adafactor):
    """Derived from one that needs them."""


def test_muon_is_refused_also_as_a_part_of_several() -> None:
    layer = nn.Linear(3, 3)
    adamw, muon = torch.optim.AdamW([layer.bias]), torch.optim.Muon([layer.weight])
    require_rows(adamw, strategy="fsdp")
    with pytest.raises(ConfigError, match="needs whole matrices"):
        require_rows(Several(muon, adamw), strategy="fsdp")
    with pytest.raises(ConfigError, match="is Slow, which needs whole matrices"):
        require_rows(Slow([layer.weight]), strategy="zero1")
