"""The names of parameters, and the patterns that choose some."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Joint, matching, named_parameters

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias", "header.weight"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["head"], {"head.weight", "head.bias"}),  # not `header`
        (["head.bias"], {"head.bias"}),
        (["*.bias", "body.1"], {"body.0.bias", "head.bias", "body.1.weight"}),
        (["body.[01]"], {"body.0.weight", "body.0.bias", "body.1.weight"}),
        (["*"], set(NAMES)),
    ],
)
def test_a_pattern_chooses_by_the_name_of_a_parameter_or_of_a_module_around_it(patterns: list[str], expected: set[str]) -> None:
    assert matching(NAMES, patterns, key="any") == expected


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups.a.match: 'haed' matches no parameter; did you mean head\?"):
        matching(NAMES, ["body", "haed"], key="optimizer.groups.a.match")


def test_parameters_have_the_names_of_the_model_whatever_is_around_it() -> None:
    class Scaled(nn.Linear):
        """Stands for an objective with weights."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    own = ["0.weight", "0.bias", "1.bias"]
    assert list(named_parameters(model)) == own
    assert list(named_parameters(nn.ModuleDict({"_orig_mod": model}))) == own  # as torch.compile(model) has them
    joint = Joint(model, Scaled(1, 1))  # type: ignore[arg-type]
    assert list(named_parameters(joint)) == [*own, "objective.weight", "objective.bias"]
