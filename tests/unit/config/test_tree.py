"""Which parts of a config make a run what it is."""

from __future__ import annotations

from ddp_train.config.tree import differences, identity
from tests.unit.parts import checked


def test_faults_do_not_change_what_a_run_is() -> None:
    """So that it can be continued without them."""
    with_faults = checked("debug=faults", "debug.faults=[{kind:kill}]").tree
    assert identity(with_faults) == identity(checked().tree)
    assert not differences(with_faults, checked().tree)
