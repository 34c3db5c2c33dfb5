"""A component of any class is taken where it has what the run needs, and else refused with its key and by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ddp_train.config.targets.target import WriterFacts
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Run, Strategy
from ddp_train.system.phase import Phases
from ddp_train.training.build.adopt import make_callbacks, make_strategy, make_writers


def node(kind: type) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{kind.__name__}"}


class Open:
    """A metric writer without `close`."""

    def write(self, record: object) -> None: ...


class Whole:
    """A strategy that does not inherit from ours."""

    def prepare(self, model: Any, device: Any, world_size: int) -> Any:
        return model


def test_a_writer_without_close_is_refused_when_it_is_made() -> None:
    facts = WriterFacts(run_dir="", config={}, hyper_parameters={}, step=0, total_steps=1, phases=Phases())
    with pytest.raises(
        ConfigError, match=r"(?s)metrics\.mine\._target_: gave a Open, which lacks close.*ddp_train\.interfaces\.MetricWriter"
    ):
        make_writers({"mine": node(Open)}, facts)


def test_a_strategy_without_prepare_is_refused_and_one_with_it_is_adapted() -> None:
    assert isinstance(make_strategy(node(Whole)), Strategy)
    with pytest.raises(ConfigError, match=r"strategy\._target_: gave a Open, which lacks prepare"):
        make_strategy(node(Open))


class Misspelt:
    def end(self, run: Run) -> None: ...

    def evaluate(self, run: Run, metrics: Mapping[str, float]) -> None: ...


class Prefixed:
    def end(self, run: Run) -> None: ...

    def on_step(self, run: Run) -> None: ...


class Helped:
    """Its other methods are its own business: one is called by an event, one takes no run, one has another name."""

    def step(self, run: Run) -> None:
        self.steps(run)

    def steps(self, run: Run) -> None: ...

    def stop(self) -> None: ...

    def compare(self, run: Run) -> None: ...


@pytest.mark.parametrize(("kind", "wrong", "right"), [(Misspelt, "evaluate", "evaluation"), (Prefixed, "on_step", "step")])
def test_a_misspelt_event_beside_a_right_one_is_refused(kind: type, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)callbacks\.mine\._target_: .*method {wrong} is no event.*did you mean {right}\?"):
        make_callbacks({"mine": node(kind)})


def test_another_method_of_a_callback_is_its_own() -> None:
    assert isinstance(make_callbacks({"mine": node(Helped)})["mine"], Helped)
