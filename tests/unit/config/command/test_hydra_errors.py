"""What Hydra says, in words that help."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_train.config.command import hydra_errors


def test_a_sweeper_that_is_not_installed_is_named_with_its_package() -> None:
    (error,) = hydra_errors._wrong_options(OverridesParser.create().parse_override("hydra/sweeper=optuna"), ["basic"])
    assert (error.happened, error.fix) == ("has no option 'optuna'", "pip install 'ddp-train[optuna]'")


def test_a_switch_that_has_become_a_group_is_told_its_option() -> None:
    options = ["default", "max_autotune", "off", "reduce_overhead"]
    for typed, meant in (("true", "default"), ("false", "off")):
        (error,) = hydra_errors._wrong_options(OverridesParser.create().parse_override(f"compile={typed}"), options)
        assert error.fix == f"did you mean compile={meant}?"
