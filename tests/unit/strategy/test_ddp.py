"""DDP names what torch numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.strategy.ddp import DDP


class Idle(nn.Module):
    """Has a head that nothing uses, and parts that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body, self.auxiliary, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.frozen(x)))
        return out


def test_parameters_without_a_gradient_are_named_with_the_key_that_allows_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = DDP().prepare(Idle(), torch.device("cpu"), 2)
        module(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ConfigError) as raised:
            module(torch.ones(2, 4))
        assert "2 of the model's 6 parameters" in raised.value.happened
        assert raised.value.happened.endswith(": auxiliary.weight, auxiliary.bias")
        key, _, value = raised.value.fix.partition("=")
        assert (key, value) == ("strategy.find_unused_parameters", "true")
        allowed = DDP(find_unused_parameters=True).prepare(Idle(), torch.device("cpu"), 2)
        for _ in range(2):
            allowed(torch.ones(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
