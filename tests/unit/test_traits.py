"""What a class tells of itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.optimizer.several_optimizers import Several
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.zero1 import Zero1
from ddp_train.traits import StrategyConstants, constants_of, needs_whole_matrices, require_rows


class Shampoo:
    """Known by its name."""


class Mine(Shampoo):
    """Derived from it."""


class Elementwise(Shampoo):
    """Says the contrary."""

    needs_whole_matrices = False


class Own:
    """Nobody knows its name."""

    needs_whole_matrices = True


def test_a_class_needs_whole_matrices_by_its_name_its_bases_or_its_own_word() -> None:
    assert [needs_whole_matrices(kind) for kind in (Shampoo, Mine, Elementwise, Own, object)] == [True, True, False, True, False]


def test_constants_are_the_classes_own_and_the_defaults_of_those_that_it_lacks() -> None:
    of_zero1, of_own = (constants_of(kind, StrategyConstants) for kind in (Zero1, Own))
    assert (of_zero1.shards_optimizer, of_zero1.has_buckets, of_zero1.shards_parameters) == (True, True, False)
    assert (of_own.shards_optimizer, of_own.needs_gpu, StrategyConstants.shards_optimizer) == (False, {}, False)


class Slow(torch.optim.Adafactor):
    """Derived from one that needs them."""


def test_muon_is_refused_also_as_a_part_of_several() -> None:
    layer = nn.Linear(3, 3)
    adamw, muon = torch.optim.AdamW([layer.bias]), torch.optim.Muon([layer.weight])
    require_rows(FSDP(), adamw)
    require_rows(DDP(), muon)
    with pytest.raises(ConfigError, match="needs whole matrices"):
        require_rows(FSDP(), Several(muon, adamw))
    with pytest.raises(ConfigError, match="is Slow, which needs whole matrices"):
        require_rows(Zero1(), Slow([layer.weight]))
