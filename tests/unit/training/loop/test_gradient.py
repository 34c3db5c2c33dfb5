"""The norm of gradients, whole and cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World, alone
from ddp_train.interfaces.strategy import local_rows
from ddp_train.training.loop.gradient import clip, total_norm
from tests.unit.sharded_tensors import example, rank_of, sharded_among


@dataclass(frozen=True, kw_only=True)
class Adding(World):
    """Adds what the other ranks have told before."""

    told: list[Tensor] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        self.told.append(values.clone())
        return torch.stack(self.told).sum(dim=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_norm_of_gradients_that_are_cut_is_that_of_the_whole_ones(replicas: int) -> None:
    whole, other, told = example(5, 3), example(4), list[Tensor]()
    expected = nn.utils.get_total_norm([whole, other])
    for rank in range(4):
        with rank_of(rank, 4, replicas=replicas) as mesh:
            world = Adding(rank=rank, size=4, local_rank=rank, local_size=4, device=torch.device("cpu"), told=told)
            gradients = [sharded_among(mesh, whole), other.clone()]
            norm = total_norm(gradients, world)
            clip(gradients, 1.0, expected)
            assert local_rows(gradients[1]).norm() == pytest.approx(float(other.norm() / expected), rel=1e-5)
            assert local_rows(gradients[0]).abs().sum() <= whole.abs().sum() / expected
    assert norm == pytest.approx(float(expected), rel=1e-6)  # the last rank has heard all


def test_a_whole_one_is_as_torch_has_it_to_the_bit() -> None:
    parameters = [nn.Parameter(example(3, 2)), nn.Parameter(example(7))]
    for limit in (0.5, 1e6):
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        gradients = [parameter.detach().clone() for parameter in parameters]
        norm = total_norm(gradients, alone())
        assert norm == nn.utils.clip_grad_norm_(parameters, limit)
        clip(gradients, limit, norm)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]
