"""DDP names what torch numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import ExchangeClock
from ddp_train.strategy import ddp
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.power_sgd import PowerSGD
from ddp_train.strategy.zero1 import Zero1


class Idle(nn.Module):
    """Has a head that nothing uses, and parts that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body, self.auxiliary, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.frozen(x)))
        return out


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [DDP, Zero1])
@pytest.mark.parametrize("dtype", ["float16", None])
def test_gradients_travel_in_the_type_that_is_asked_for(group: None, kind: type[DDP], dtype: Literal["float16"] | None) -> None:
    torch.manual_seed(0)
    x, gradients = torch.randn(8, 5), []
    for given in (None, dtype):
        module = kind(reduce_dtype=given).prepare(nn.Linear(5, 3), torch.device("cpu"), 2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
        for _ in range(2):  # the buckets are rebuilt after the first
            module.zero_grad()
            module(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    for exact, found in zip(*gradients, strict=True):
        assert torch.equal(found, exact if dtype is None else exact.to(getattr(torch, dtype)).float())
        assert torch.equal(found, exact) == (dtype is None)


@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        (DDP(reduce_dtype="float16"), "fp16_compress_hook"),
        (DDP(reduce_dtype="bfloat16"), "bf16_compress_hook"),
        (PowerSGD(), "noop_hook"),  # DDP exchanges nothing: whole gradients would travel, too
    ],
)
def test_buckets_are_exchanged_by_torchs_own_hooks(group: None, monkeypatch: pytest.MonkeyPatch, strategy: DDP, hook: str) -> None:
    registered = []
    monkeypatch.setattr(ddp.DistributedDataParallel, "register_comm_hook", lambda module, state, hook: registered.append(hook.__name__))
    strategy.prepare(nn.Linear(2, 2), torch.device("cpu"), 2)
    assert registered == [hook]


def test_batch_norms_are_synchronised_in_their_places_with_their_own_parameters(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_DDPModule", lambda model, **settings: model)  # torch refuses them on a CPU
    strategy, model = DDP(sync_batchnorm=True), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4, eps=0.1), nn.ReLU()))
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    strategy.prepare(model, torch.device("cpu"), 2)
    norm = model[1][0]
    strategy.prepare(model, torch.device("cpu"), 2)  # again, when others are trained
    assert model[1][0] is norm
    assert type(norm) is nn.SyncBatchNorm and norm.eps == 0.1
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert after.keys() == before.keys() and all(after[name] is each for name, each in before.items())
    plain = nn.Sequential(nn.BatchNorm1d(4))
    DDP().prepare(plain, torch.device("cpu"), 2)
    assert type(plain[0]) is nn.BatchNorm1d
    with pytest.raises(ConfigError, match="the model has no batch norm"):
        strategy.prepare(nn.Linear(2, 2), torch.device("cpu"), 2)


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


def test_the_clock_is_called_once_in_each_backward_when_all_gradients_are_there_and_before_the_wait(group: None) -> None:
    net, found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), list[list[bool]]()
    strategy = DDP()
    module = strategy.prepare(net, torch.device("cpu"), 2)

    def step() -> None:
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()

    module(torch.ones(1, 2)).sum().backward()
    assert DDP.exchange_is_timed and found == []
    strategy.set_clock(ExchangeClock(begin_in_backward=lambda: found.append([each.grad is not None for each in net.parameters()])))
    step()
    step()
    with torch.no_grad():
        module(torch.ones(1, 2))
    strategy.set_clock(ExchangeClock())
    step()
    assert found == [[True] * 4] * 2
