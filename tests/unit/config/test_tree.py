"""Which parts of a config make a run what it is."""

from __future__ import annotations

from ddp_train.config.tree import differences, identity, nodes
from tests.unit.parts import checked


def test_faults_do_not_change_what_a_run_is() -> None:
    """So that it can be continued without them."""
    with_faults = checked("debug=faults", "debug.faults=[{kind:kill}]").tree
    assert identity(with_faults) == identity(checked().tree)
    assert not differences(with_faults, checked().tree)


def test_items_of_lists_that_are_nodes_have_keys_too() -> None:
    assert [*dict(nodes({"a": {"b": 1}, "c": [{"d": 2}, 3]}))] == ["a", "a.b", "c", "c.0", "c.0.d"]


def test_what_differs_is_named_with_both_values() -> None:
    ours, theirs = ({"model": {"width": width, **more}, "name": str(width)} for width, more in ((8, {}), (9, {"depth": 2})))
    assert differences(ours, theirs) == ["model.depth: 2 -> (absent)", "model.width: 9 -> 8"]
