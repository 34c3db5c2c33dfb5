"""Which parts of a config make a run what it is."""

from __future__ import annotations

import pytest

from ddp_train.config import tree
from ddp_train.config.schema import NAMED, ROOT_KEYS, SECTIONS, TARGETS, keys_of
from ddp_train.config.tree import differences, dotted_items, identity
from tests.unit.parts import checked


def test_faults_do_not_change_what_a_run_is() -> None:
    """So that it can be continued without them."""
    with_faults = checked("debug=faults", "debug.faults=[{kind:kill}]").tree
    assert identity(with_faults) == identity(checked().tree)
    assert not differences(with_faults, checked().tree)


WITH_EFFECT_ON_RESULTS = (
    *("seed", "deterministic", "init_from", "init_from_keys", "init_from_strict"),
    *("data", "model", "objective", "optimizer", "scheduler", "amp", "strategy", "callbacks"),
    *("loader", "trainer", "precision", "compile", "health", "debug"),
    "evaluation",  # its numbers are results; early_stopping and a plateau schedule decide by them
)


def test_every_key_and_section_is_said_to_change_the_results_or_not() -> None:
    """So that a new one is thought about."""
    said = [*WITH_EFFECT_ON_RESULTS, *tree.WITHOUT_EFFECT_ON_RESULTS]
    assert len(said) == len(set(said))
    at_the_root = {*ROOT_KEYS, *SECTIONS, *TARGETS, *NAMED}
    assert at_the_root - {*said} == set()
    assert {*said} - at_the_root - {key for name, schema in SECTIONS.items() for key in keys_of(schema, f"{name}.")} == set()  # no old ones
    assert all(tree.WITHOUT_EFFECT_ON_RESULTS.values())


@pytest.mark.parametrize(
    ("overrides", "is_another"),
    [
        (["evaluation.every_steps=7"], True),  # a plateau schedule and early stopping decide by it
        (["evaluation.max_batches=7"], True),
        (["debug.max_batches=3"], True),  # of an evaluation
        (["evaluation.save_predictions=true"], False),
        (["profile=trace"], False),
        (["activation_checkpointing=full"], False),
        (["cluster.processes_per_node=1", "trainer.global_batch_size=64"], False),
        (["metrics=csv", "checkpoint.every_steps=3", "loader.num_workers=2"], False),
    ],
)
def test_what_has_an_effect_on_results_makes_another_run(overrides: list[str], is_another: bool) -> None:
    usual, other = checked("trainer.global_batch_size=64").tree, checked("trainer.global_batch_size=64", *overrides).tree
    assert (identity(other) != identity(usual)) == bool(differences(other, usual)) == is_another


def test_jobs_of_a_sweep_differ_by_what_is_swept() -> None:
    one, two = (checked(f"loader.num_workers={count}").tree for count in (1, 2))
    assert identity(one) == identity(two)
    assert identity(one, swept=["loader.num_workers"]) != identity(two, swept=["loader.num_workers"])


def test_items_of_lists_that_are_nodes_have_keys_too() -> None:
    assert [*dict(dotted_items({"a": {"b": 1}, "c": [{"d": 2}, 3]}))] == ["a", "a.b", "c", "c.0", "c.0.d"]


def test_what_differs_is_named_with_both_values() -> None:
    ours, theirs = ({"model": {"width": width, **more}, "name": str(width)} for width, more in ((8, {}), (9, {"depth": 2})))
    assert differences(ours, theirs) == ["model.depth: 2 -> (absent)", "model.width: 9 -> 8"]
