"""Our keys inside the configs of optimizer and scheduler: what they must be is said before any process starts."""

from __future__ import annotations

import pytest

from ddp_train.errors import ConfigErrors
from tests.unit.parts import checked


class Grouping:
    """An optimizer that has `groups` of its own."""

    def __init__(self, params: object, groups: int = 1) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["+optimizer.groups.head=3"], r"optimizer\.groups\.head: is 3"),
        (["+optimizer.groups.head={lr: 0.1}"], r"optimizer\.groups\.head\.match: is not given"),
        (["+optimizer.groups.head={match: [], lr: 0.1}"], r"optimizer\.groups\.head\.match: is \[\]"),
        (["+optimizer.groups.head={match: head}"], r"optimizer\.groups\.head: has only match, and changes nothing"),
        (["+optimizer.groups.head={match: head, freeze: 1}"], r"optimizer\.groups\.head\.freeze: is 1"),
        (["+optimizer.groups.head={match: head, freeze: true, lr: 0.1}"], r"optimizer\.groups\.head\.lr: is given with freeze=true"),
        (
            ["+optimizer.groups.head={match: head, weight_deca: 0.1}"],
            r"has no argument 'weight_deca'(.|\n)*did you mean .*head\.weight_decay",
        ),
        (["optimizer=muon", "+optimizer.groups.head={match: head, lr: 0.1}"], r"groups\.head\.lr: is given, and .*muon takes the model"),
        (["optimizer.layer_decay=1.5"], r"optimizer\.layer_decay: is 1\.5"),
        (["optimizer=muon", "+optimizer.layer_decay=0.5"], r"optimizer\.layer_decay: is given, and .*muon takes the model"),
        (["scheduler.every=week"], r"scheduler\.every: is 'week'"),
        (
            ["scheduler=plateau", "+scheduler.every=epoch"],
            r"scheduler\.every: is epoch, and ReduceLROnPlateau steps after each evaluation",
        ),
        (["+scheduler.metric=loss"], r"scheduler\.metric: is given, and .*warmup_cosine follows no metric"),
        (["scheduler=plateau", "data.eval=null"], r"scheduler: follows a metric of the evaluation, and data\.eval is null"),
        (["optimizer.groups=head"], r"optimizer\.groups: is 'head'"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigErrors, match=says):
        checked(*overrides)


def test_a_class_with_an_argument_of_that_name_keeps_it() -> None:
    own = [f"optimizer._target_={__name__}.Grouping", *(f"~optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "fused"))]
    checked(*own, "optimizer.groups=3")
    with pytest.raises(ConfigErrors, match=r"optimizer\.groups: is '3'"):
        checked(*own, "optimizer.groups='3'")
