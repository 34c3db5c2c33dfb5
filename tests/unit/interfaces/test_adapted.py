"""An object of another class gives what it has at that moment, for every public member of our base, and our default for the others."""

from __future__ import annotations

import pickle
from abc import ABCMeta
from typing import Any

import pytest
import torch

from ddp_train.errors import ConfigError
from ddp_train.interfaces import DataSource, MetricWriter, Objective, Scheduler, Strategy
from ddp_train.interfaces.adapted import Adapted, own_member, require_members
from ddp_train.interfaces.strategy import AdaptedStrategy
from ddp_train.loader.dataset_adapter import AdaptedSource, as_source

ADAPTED: list[tuple[type[Adapted], ABCMeta]] = [(AdaptedStrategy, Strategy), (AdaptedSource, DataSource)]


class Own:
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
    own = Own()
    adapted = kind(own)
    assert isinstance(adapted, base) and len(optional(base)) > 10
    for name in optional(base):
        for value in (True, False):
            setattr(own, name, value)
            assert getattr(adapted, name) is value, name


@pytest.mark.parametrize(("kind", "base"), ADAPTED)
def test_what_the_object_lacks_is_our_default(kind: type[Adapted], base: ABCMeta) -> None:
    adapted = kind(Own())
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
        (Objective, "goals, weight, score, metrics, loss"),
    ],
)
def test_one_without_what_an_interface_asks_for_is_refused_by_name(interface: type, missing: str) -> None:
    match = rf"mine\._target_: gave a object, which lacks {missing}[^,].*ddp_train\.interfaces\.{interface.__name__}"
    with pytest.raises(ConfigError, match=match):
        require_members(object(), interface, key="mine")


def test_its_other_attributes_are_reached_also_in_another_process() -> None:
    source = pickle.loads(pickle.dumps(AdaptedSource(Own())))
    source.own.vocabulary = "ab"
    assert source.vocabulary == "ab"
    with pytest.raises(AttributeError, match="decode"):
        source.decode([0])


def test_a_member_that_prepare_sets_is_seen() -> None:
    class Late(Own):
        def prepare(self, model: Any, device: torch.device, world_size: int) -> Any:
            self.param_dtype, self.graph_is_static, self.shards_optimizer = torch.bfloat16, True, True
            return model

    strategy = AdaptedStrategy(Late())
    assert (strategy.param_dtype, strategy.graph_is_static, strategy.shards_optimizer) == (None, False, False)
    strategy.prepare(torch.nn.Identity(), torch.device("cpu"), 2)
    assert (strategy.param_dtype, strategy.graph_is_static, strategy.shards_optimizer) == (torch.bfloat16, True, True)


class Broken(Own):
    """Its members have an error of their own."""

    @property
    def fingerprint(self) -> Any:
        return {"size": self.no_such_size}  # type: ignore[attr-defined]

    @property
    def shards_parameters(self) -> Any:
        raise AttributeError("no such size")

    classes = labels = fingerprint


class Around(Own):
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
    assert caught.traceback[-1].path.name == "test_adapted.py" and caught.traceback[-1].name in ("fingerprint", "shards_parameters")


def test_an_error_in_what_is_abstract_is_not_taken_for_a_missing_member() -> None:
    class Unready(Own):
        @property
        def facts(self) -> Any:  # type: ignore[override]
            return self.no_such_size  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_size"):
        as_source(Unready())


def test_a_wrapper_and_an_empty_slot_give_our_default_for_what_nobody_has() -> None:
    class Slotted(Own):
        __slots__ = ("lengths",)

    assert (AdaptedSource(Around(Own())).labels, AdaptedSource(Slotted()).lengths) == (None, None)
    assert (own_member(Around(Own()), "labels", 3), own_member(torch.nn.Identity(), "labels", 3)) == (3, 3)
