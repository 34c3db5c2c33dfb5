"""Evaluation: every sample once, and nothing left changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError
from ddp_train.training.evaluation import averages, evaluate
from tests.unit.parts import components, trainer


def test_evaluation_leaves_the_model_in_training_mode_and_counts_every_sample() -> None:
    parts = components()
    parts.model.train()
    metrics = evaluate(parts, alone())
    assert parts.model.training
    assert metrics is not None
    assert metrics["accuracy"] * 101 == pytest.approx(round(metrics["accuracy"] * 101))


class OneUse:
    """Mixed precision of one's own, whose contexts can be entered once, as those of `contextmanager`."""

    def __init__(self) -> None:
        self.entered = 0

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        self.entered += 1
        yield

    def scaler(self, device: torch.device, world_size: int = 1) -> Any:
        return torch.amp.GradScaler(device.type, enabled=False)


def test_each_batch_has_a_context_of_its_own_in_training_and_in_evaluation() -> None:
    parts = components("evaluation.batch_size=32", "loader.micro_batch_size=16", "trainer.grad_accum_steps=2", "trainer.max_steps=3")
    parts.amp = OneUse()
    trainer(parts).train()
    assert parts.amp.entered == 3 * 2 + 4  # 101 samples are four batches


class Averages:
    """A callback that has one weight for evaluation."""

    def __init__(self, name: str, weight: Any) -> None:
        self.weights = {name: weight}

    def evaluation_weights(self) -> dict[str, Any]:
        return self.weights


class Lost(Averages):
    def evaluation_weights(self) -> dict[str, Any]:
        raise RuntimeError("no luck")


def test_weights_for_evaluation_that_do_not_fit_name_the_callback_and_the_parameter() -> None:
    parts = components()
    name, own = next(parts.model.named_parameters())
    for wrong, weight, said in (
        (name + "s", own, f"gives '{name}s', which the model does not have; did you mean {name}"),
        (name, own[:1], rf"gives {name}: float32 \[1, .*which is float32 \["),
        (name, None, f"gives {name}: None, which is float32"),
    ):
        parts.callbacks = {"mine": Averages(wrong, weight)}
        with pytest.raises(ConfigError, match=said) as caught:
            evaluate(parts, alone())
        assert caught.value.key == "callbacks.mine"
    parts.callbacks = {"mine": Lost(name, own)}
    with pytest.raises(RuntimeError, match="no luck") as lost:
        evaluate(parts, alone())
    assert lost.value.__notes__ == ["config key: callbacks.mine (in its `evaluation_weights`)"]
    parts.callbacks = {"mine": Averages(name, own.half())}
    assert averages(parts).keys() == {name}
