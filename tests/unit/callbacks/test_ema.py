"""The averages are what the formula says, are evaluated in the weights' place, and come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.callbacks.ema import EMA
from ddp_train.checkpoint.read import read_shared
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.unit.callbacks.fake_run import FakeRun
from tests.unit.parts import components, saved, trainer
from tests.unit.training.finished import finished


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.25)
    model(torch.randn(8, 3))  # batch norm's averages


def averages(ema: EMA) -> dict[str, Tensor]:
    found: dict[str, Tensor] = ema.state_dict()["averages"]
    return found


def test_it_is_the_formula_with_its_warm_up() -> None:
    run, ema = FakeRun(), EMA(decay=0.3)
    ema.on_start(run)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var"]
    assert list(averages(ema)) == names
    expected = {name: run.model.state_dict()[name].clone() for name in names}
    for update in range(1, 7):
        change(run.model)
        run.step += 1
        ema.on_step(run)
        decay = min(0.3, (1 + update) / (10 + update))
        expected = {name: decay * value + (1 - decay) * run.model.state_dict()[name] for name, value in expected.items()}
    assert decay == 0.3
    for name, average in averages(ema).items():
        torch.testing.assert_close(average, expected[name])


def test_it_updates_every_so_many_steps_and_averages_half_precision_in_float32() -> None:
    run, ema = FakeRun(model=nn.Linear(3, 2).bfloat16()), EMA(every_steps=2)
    ema.on_start(run)
    for run.step in (1, 2, 3, 4):
        ema.on_step(run)
    assert ema.state_dict()["num_updates"] == 2
    assert {average.dtype for average in averages(ema).values()} == {torch.float32}


def test_the_averages_are_evaluated_and_the_weights_are_back_afterwards() -> None:
    parts = components("model=convnet", "model.width=4", "callbacks=ema", "callbacks.ema.decay=0.9", "trainer.max_steps=4")
    assert trainer(parts, evaluate_every_steps=100).train()
    raw = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    found = evaluate(parts, alone())
    assert all(torch.equal(raw[name], tensor) for name, tensor in parts.model.state_dict().items())
    ema = parts.callbacks["ema"]
    parts.model.load_state_dict({**raw, **averages(ema)})
    parts = replace(parts, callbacks={})
    assert evaluate(parts, alone()) == found
    parts.model.load_state_dict(raw)
    assert evaluate(parts, alone()) != found
    ema._for_evaluation = False
    assert ema.evaluation_weights() is None


def test_the_averages_are_in_the_checkpoint_once_and_come_back(tmp_path: Path) -> None:
    few = ["callbacks=ema", "trainer.max_steps=3"]
    parts = components(*few)
    trainer(parts).train()
    before = averages(parts.callbacks["ema"])
    checkpoint = saved(tmp_path, 3, parts)
    again = components(*few)
    start_from(checkpoint, again, TrainState(), alone())
    again.callbacks["ema"].on_start(FakeRun(model=again.model))
    assert again.callbacks["ema"].state_dict()["num_updates"] == 3
    assert all(torch.equal(value, averages(again.callbacks["ema"])[name]) for name, value in before.items())
    alone_read = read_shared(checkpoint, only=["averages"])["averages"]  # as what takes a finished run's weights does
    assert all(torch.equal(value, alone_read[name]) for name, value in before.items())
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size < 1.2 * sum(4 * value.nbytes for value in before.values())  # weights, AdamW's two, and the averages


def test_what_is_taken_from_a_finished_run_are_the_averages_tied_ones_too(tmp_path: Path) -> None:
    tied = ["model=gpt", "model.num_layers=1", "model.width=8", "model.num_heads=1", "model.vocab_size=10", "model.context_length=4"]
    parts = finished(tmp_path, *tied, "callbacks=ema", base=[])
    ema = parts.callbacks["ema"]
    ema.on_start(FakeRun(model=parts.model))
    for average in averages(ema).values():
        average.fill_(0.5)
    saved(tmp_path / "checkpoints", 8, parts)
    model = ddp_train.load(tmp_path).model
    assert model.head.weight is model.token_embedding.weight
    assert all((parameter == 0.5).all() for parameter in model.parameters())
    assert not any((parameter == 0.5).all() for parameter in parts.model.parameters())


def test_a_rewind_to_a_checkpoint_without_them_begins_anew(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 1, components("trainer.max_steps=3"))
    parts = components("callbacks=[ema,early_stopping]", "trainer.max_steps=3", "trainer.global_batch_size=32")
    trainer(parts, evaluate_every_steps=1).train()
    for average in averages(parts.callbacks["ema"]).values():
        average.fill_(float("nan"))
    start_from(checkpoint, parts, TrainState(), alone())
    assert parts.callbacks["ema"].state_dict() == {"num_updates": 0, "averages": {}}
    assert parts.callbacks["early_stopping"].state_dict()["best"] is None


def test_of_another_model_they_are_refused() -> None:
    ema = EMA()
    ema.load_state_dict({"num_updates": 1, "averages": {"other": torch.zeros(1)}})
    with pytest.raises(ValueError, match="another model"):
        ema.on_start(FakeRun())
    for wrong in ("decay=1.0", "every_steps=0"):
        with pytest.raises(ConfigErrors, match=rf"callbacks\.slow\.{wrong.replace('=', ': is ')}"):
            components("+callbacks.slow._target_=ddp_train.callbacks.ema.EMA", f"+callbacks.slow.{wrong}")
    with pytest.raises(ConfigError, match=r"callbacks\.second"):
        components("callbacks=ema", "+callbacks.second._target_=ddp_train.callbacks.ema.EMA")
