"""What a class tells of itself."""

from __future__ import annotations

import pickle
from abc import ABCMeta
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import DataSource, MetricWriter, Scheduler, Strategy
from ddp_train.interfaces.strategy import AdaptedStrategy
from ddp_train.loader.dataset_adapter import AdaptedSource, as_source
from ddp_train.optimizer.several_optimizers import Several
from ddp_train.strategy.ddp import DDP
from ddp_train.strategy.fsdp import FSDP
from ddp_train.strategy.zero1 import Zero1
from ddp_train.training.build.make import require_rows
from ddp_train.traits import Adapted, StrategyConstants, constants_of, member_of, needs_whole_matrices, require_members


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
    assert (of_own.shards_optimizer, of_own.offloads, StrategyConstants.shards_optimizer) == (False, (), False)


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


ADAPTED: list[tuple[type[Adapted], ABCMeta]] = [(AdaptedStrategy, Strategy), (AdaptedSource, DataSource)]


class Users:
    """Has what both bases ask for, as a user writes it who has never seen them."""

    facts = {"num_classes": 2}  # noqa: RUF012

    def prepare(self, model: Any, device: torch.device, world_size: int) -> Any:
        return model

    def __len__(self) -> int:
        return 6

    def batch(self, indices: Any) -> Any:
        return indices


def optional(base: ABCMeta) -> list[str]:
    return [name for name in dir(base) if not name.startswith("_") and name not in base.__abstractmethods__]


@pytest.mark.parametrize(("kind", "base"), ADAPTED)
def test_every_member_is_the_objects_as_soon_as_it_has_it(kind: type[Adapted], base: ABCMeta) -> None:
    own = Users()
    adapted = kind(own)
    assert isinstance(adapted, base) and len(optional(base)) > 10
    for name in optional(base):
        for value in (True, False):
            setattr(own, name, value)
            assert getattr(adapted, name) is value, name


@pytest.mark.parametrize(("kind", "base"), ADAPTED)
def test_what_the_object_lacks_is_our_default(kind: type[Adapted], base: ABCMeta) -> None:
    adapted = kind(Users())
    for name in optional(base):
        default, found = getattr(base, name), getattr(adapted, name)
        if not isinstance(default, property):
            assert (found.__func__ if callable(default) else found) is default, name
    if isinstance(adapted, DataSource):
        assert (adapted.augments, adapted.labels, adapted.lengths, adapted.fingerprint, adapted.meaning) == (False, None, None, {}, {})


@pytest.mark.parametrize(
    ("interface", "missing"),
    [
        (Strategy, "prepare"),
        (DataSource, "facts, __len__, batch"),
        (MetricWriter, "write, close"),
        (Scheduler, "step, get_last_lr, state_dict, load_state_dict"),
    ],
)
def test_one_without_what_an_interface_asks_for_is_refused_by_name(interface: type, missing: str) -> None:
    match = rf"mine\._target_: gave a object, which lacks {missing}[^,].*ddp_train\.interfaces\.{interface.__name__}"
    with pytest.raises(ConfigError, match=match):
        require_members(object(), interface, key="mine")


def test_its_other_attributes_are_reached_also_in_another_process() -> None:
    source = pickle.loads(pickle.dumps(AdaptedSource(Users())))
    source.wrapped.vocabulary = "ab"
    assert source.vocabulary == "ab"
    with pytest.raises(AttributeError, match="decode"):
        source.decode([0])


def test_a_member_that_prepare_sets_is_seen() -> None:
    class Late(Users):
        def prepare(self, model: Any, device: torch.device, world_size: int) -> Any:
            self.param_dtype, self.graph_is_static, self.shards_optimizer = torch.bfloat16, True, True
            return model

    strategy = AdaptedStrategy(Late())
    assert (strategy.param_dtype, strategy.graph_is_static, strategy.shards_optimizer) == (None, False, False)
    strategy.prepare(torch.nn.Identity(), torch.device("cpu"), 2)
    assert (strategy.param_dtype, strategy.graph_is_static, strategy.shards_optimizer) == (torch.bfloat16, True, True)


class Broken(Users):
    """Its members have an error of their own."""

    @property
    def fingerprint(self) -> Any:
        return {"size": self.no_such_size}  # type: ignore[attr-defined]

    @property
    def shards_parameters(self) -> Any:
        raise AttributeError("no such size")

    classes = labels = fingerprint


class Around(Users):
    """A wrapper that passes on what it does not have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("own", [Broken(), Around(Broken()), Around(Around(Broken()))])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(AdaptedSource, name) for name in ("fingerprint", "labels", "facts", "meaning", "classes")] + [(AdaptedStrategy, "shards_parameters")],
)
def test_an_error_in_a_member_is_no_default_and_keeps_its_traceback(kind: type[Adapted], name: str, own: Any) -> None:
    with pytest.raises(AttributeError, match=r"no.such.size") as caught:
        getattr(kind(own), name)
    assert caught.traceback[-1].path.name == "test_traits.py" and caught.traceback[-1].name in ("fingerprint", "shards_parameters")


def test_an_error_in_what_is_abstract_is_not_taken_for_a_missing_member() -> None:
    class Unready(Users):
        @property
        def facts(self) -> Any:  # type: ignore[override]
            return self.no_such_size  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_size"):
        as_source(Unready())


def test_a_wrapper_and_an_empty_slot_give_our_default_for_what_no_class_has() -> None:
    class Slotted(Users):
        __slots__ = ("lengths",)

    assert (AdaptedSource(Around(Users())).labels, AdaptedSource(Slotted()).lengths) == (None, None)
    assert (member_of(Around(Users()), "labels", 3), member_of(torch.nn.Identity(), "labels", 3)) == (3, 3)
