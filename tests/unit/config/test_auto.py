"""Arguments that are `auto`: answered by the data or the run, or refused; what they came to stands in config.yaml."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.config import auto
from ddp_train.errors import ConfigError, ConfigErrors
from tests.unit.parts import checked, components


class Plain(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Ten classes, and not a word about them."""

    def __init__(self, num_samples: int = 64) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 16, 16), index % 10


class Settings:
    def __init__(self, num_labels: int = 2) -> None:
        self.num_labels = num_labels


def make_settings(**kwargs: Any) -> Settings:
    return Settings(**kwargs)


class Configured(nn.Module):
    """Takes any name, as torchvision's functions do, and a settings object, as transformers' models do."""

    def __init__(self, config: Settings | None = None, sizes: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.head = nn.Linear(8, config.num_labels if config else kwargs.get("num_classes", 1000))
        self.config, self.sizes = config, sizes


class Passing(Configured):
    """Passes on whatever it gets, as torchvision's functions do."""

    def __init__(self, config: Settings | None = None, **kwargs: Any) -> None:
        super().__init__(config)
        nn.Linear(4, 4, **kwargs)


OWN_DATA = ["~data", "+data._target_=tests.unit.config.test_auto.Plain", "+data.eval.num_samples=10", "~metrics.tensorboard"]
OWN_MODEL = ["~model", "+model._target_=tests.unit.config.test_auto.Configured"]


def refused(*overrides: str, base: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        components(*overrides, base=base)
    return raised.value


def test_an_auto_that_the_data_does_not_answer_is_refused_with_what_it_has() -> None:
    error = refused("+model.num_classes=auto", base=[*OWN_DATA, *OWN_MODEL])
    assert str(error) == (
        "model.num_classes: is auto, and the data does not provide it\n"
        "  expected: a fact of the data; it has none (`facts` of a data set: `ddp-train help docs/data.md`)\n"
        "  fix: model.num_classes=VALUE"
    )
    assert error.exit_code == 2
    parts = components("+model.num_classes=10", base=[*OWN_DATA, *OWN_MODEL])
    assert parts.model.head.out_features == 10  # type: ignore[union-attr]


def test_all_that_the_data_does_not_answer_is_told_at_once() -> None:
    error = refused("model=gpt", base=[])
    assert error.key == "model.vocab_size, model.context_length"
    assert "it has image_shape=[3,16,16], num_classes=10" in error.expected
    assert error.fix == "model.vocab_size=VALUE model.context_length=VALUE, or text: data=char_text objective=language_modeling"


def test_a_fact_of_a_similar_name_is_advised_with_its_value() -> None:
    own = [*OWN_MODEL, "~metrics.tensorboard"]
    error = refused("+model.num_clases=auto", base=own)
    assert error.fix == "model.num_clases=10"
    components("+model.num_clases=10", base=own)


def test_an_auto_inside_a_node_is_answered_too() -> None:
    nested = [
        "+model.config._target_=tests.unit.config.test_auto.Settings",
        "+model.config.num_labels=auto",
        "+model.sizes=[{num_classes:auto}]",
    ]
    parts = components(base=[*OWN_MODEL, *nested, "~metrics.tensorboard"])
    assert parts.model.config.num_labels == 10  # type: ignore[union-attr]
    assert parts.model.sizes == [{"num_classes": 10}]
    wanted = {"model.config.num_labels": 10, "model.sizes.0.num_classes": 10, "scheduler.total_steps": parts.total_steps}
    assert {key: parts.answers[key] for key in wanted} == wanted


@pytest.mark.parametrize("key", ["model.width", "model.config.width"])
def test_an_argument_that_is_passed_on_in_vain_is_refused_with_its_key(key: str) -> None:
    own = [
        "~model",
        "+model._target_=tests.unit.config.test_auto.Passing",
        "+model.config._target_=tests.unit.config.test_auto.make_settings",
    ]
    error = refused(f"+{key}=3", base=[*own, "~metrics.tensorboard"])
    assert (error.key, error.fix) == (key, f"remove it: '~{key}'")
    assert "unexpected keyword argument 'width'" in error.happened


def test_without_a_fact_an_argument_that_can_do_without_is_null() -> None:
    facts = {"vocab_size": 256, "context_length": 8}
    values = {"_target_": "ddp_train.objective.language_modeling.LanguageModeling", "ignore_index": "auto"}
    assert auto.answer({"objective": values}, facts) == {"objective.ignore_index": None}


class OwnWord:
    def __init__(self, mode: str | None = None, size: object = "auto", width: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("section", "giver"), [("model", "the data"), ("objective", "the data"), ("scheduler", "the run"), ("metrics", "the run")]
)
def test_a_class_may_have_a_meaning_of_its_own_for_auto(section: str, giver: str) -> None:
    values = {"_target_": "tests.unit.config.test_auto.OwnWord", "mode": "auto", "size": "auto"}
    assert [*auto.find_unanswerable({section: values}, (section,))] == []
    assert auto.answer({section: values}, {"step": 3}) == {}
    assert auto.answer({section: values}, {"size": 3}) == {f"{section}.size": 3}
    with pytest.raises(
        ConfigError, match=rf"{section}.width: is auto, and {giver} does not provide it\n.* a fact of {giver}; it has step=3"
    ):
        auto.answer({section: {**values, "width": "auto"}}, {"step": 3})


@pytest.mark.parametrize(
    ("override", "key", "said", "fix"),
    [
        ("optimizer.lr=auto", "optimizer.lr", "facts of the data in model and objective", "optimizer.lr=0.001"),
        (
            "scheduler.warmup_steps=auto",
            "scheduler.warmup_steps",
            "of the run in scheduler and metrics (total_steps, steps_per_epoch)",
            "scheduler.warmup_steps=0",
        ),
        ("data.image_size=auto", "data.image_size", "facts of the data in model and objective", "data.image_size=16"),
        ("strategy.bucket_cap_mb=auto", "strategy.bucket_cap_mb", "of the run in", "strategy.bucket_cap_mb=25"),
        ("model.image_shape=[auto,16,16]", "model.image_shape.0", "a value", "VALUE"),
    ],
)
def test_what_nothing_can_answer_is_refused_before_anything_starts(override: str, key: str, said: str, fix: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        checked(override, base=[])
    (error,) = raised.value.errors
    assert (error.key, said in error.expected, fix in error.fix) == (key, True, True), str(error)
    if "VALUE" not in error.fix:
        checked(error.fix, base=[])
