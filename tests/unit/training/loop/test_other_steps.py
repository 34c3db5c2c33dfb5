"""The optimizer's step in backward: the same weights, to the bit, and never all gradients at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigErrors, NonFiniteLossError
from ddp_train.training.check.memory import memory_by_part
from ddp_train.training.check.rehearsal import try_step
from ddp_train.training.parts.components import Components
from ddp_train.training.record.records import Record
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.unit.parts import ChosenStop, checked, components, saved, trainer

EARLY = "trainer.optimizer_in_backward=true"
OWN = f"optimizer._target_={__name__}"
FIVE = ["trainer.max_steps=5", "trainer.max_epochs=null"]
GPT = ["data=char_text", "model=gpt", "model.num_layers=2", "model.num_heads=2", "model.width=16", "objective=language_modeling"]
GPT += ["data.context_length=8", "~metrics.tensorboard", "loader.micro_batch_size=16"]


class Whole(torch.optim.Optimizer):
    """Of another package than torch."""


class Alone(torch.optim.SGD):
    """Says that it may."""

    steps_parameters_alone = True


def trained(*overrides: str, base: list[str] | None = None, state: TrainState | None = None) -> tuple[Components, list[Record]]:
    parts = components(*FIVE, *overrides, **({} if base is None else {"base": base}))
    records: list[Record] = []
    trainer(parts, state, write=records.append).train()
    return parts, records


def weights(parts: Components) -> list[Tensor]:
    return [*parts.model.parameters(), *(value for values in parts.optimizer.state.values() for value in values.values())]


def numbers(records: list[Record]) -> list[tuple[object, ...]]:
    return [tuple(record.get(name) for name in ("split", "step", "loss", "grad_norm", "lr")) for record in records]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_state_and_norms_are_those_of_steps_after_backward(optimizer: str) -> None:
    early, late = trained(f"optimizer={optimizer}", EARLY), trained(f"optimizer={optimizer}")
    for mine, theirs in zip(weights(early[0]), weights(late[0]), strict=True):
        assert torch.equal(mine, theirs)
    assert numbers(early[1]) == numbers(late[1])
    assert all(record["grad_norm"] > 0 for record in early[1] if record["split"] == "train")


def test_tied_weights_blocks_that_are_computed_again_and_chunked_logits_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    base = [*GPT, f"data.path={tmp_path}/text.txt", "activation_checkpointing=full", "objective.chunk_tokens=32"]
    early, late = trained(EARLY, base=base), trained(base=base)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(early[0]), weights(late[0]), strict=True))


def test_a_part_that_is_frozen_at_first_is_stepped_once_it_is_trained() -> None:
    freeze = ["callbacks=freeze", "callbacks.freeze.patterns=[hidden.0]", "callbacks.freeze.until_step=2"]
    early, late = trained(EARLY, *freeze), trained(*freeze)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(early[0]), weights(late[0]), strict=True))


def test_a_few_gradients_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(*overrides: str) -> int:
        parts, found = components("model.depth=6", *overrides), [0]
        named = list(parts.model.parameters())

        def look(_: Tensor) -> None:
            found[0] = max(found[0], sum(each.grad is not None for each in named))

        for parameter in named:
            parameter.register_post_accumulate_grad_hook(look)
        steps = trainer(parts)
        steps.train_step([parts.train_loader.peek()], global_batch_size=32)
        assert all(each.grad is None for each in named)
        return found[0]

    parameters = len(list(components("model.depth=6").model.parameters()))
    assert most() == parameters
    assert most(EARLY) <= 1
    assert memory_by_part(components(EARLY), num_ranks=1)["gradients"] == 0


def test_a_backward_that_is_no_step_changes_nothing() -> None:
    parts = components(EARLY)
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    try_step(parts, alone())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts.model.parameters(), before, strict=True))


def test_a_run_goes_on_from_a_checkpoint_with_it_and_without(tmp_path: Path) -> None:
    whole = trained("trainer.max_steps=5", EARLY)[0]
    parts = components(*FIVE, EARLY)
    state = TrainState()
    trainer(parts, state, stop=ChosenStop(3)).train()
    checkpoint = saved(tmp_path, 3, parts)
    for overrides in ([EARLY], []):
        again, position = components(*FIVE, *overrides), TrainState()
        start_from(checkpoint, again, position, alone())
        trainer(again, position).train()
        assert position.step == 5
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights(again), weights(whole), strict=True))


def test_a_loss_that_is_lost_ends_the_run_before_anything_is_saved() -> None:
    parts, saves = components(*FIVE, EARLY), list[int]()
    next(iter(parts.model.parameters())).data.fill_(math.nan)
    with pytest.raises(NonFiniteLossError):
        trainer(parts, save=lambda window: saves.append(1)).train()
    assert not saves


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.clip_grad_norm=1"], "trainer.clip_grad_norm: is 1.0"),
        (["trainer.grad_accum_steps=2"], "a step has several micro-batches"),
        (["health.on_nonfinite=skip"], "health.on_nonfinite: is skip"),
        (["trainer.global_batch_size=32", "trainer.batch_size_schedule={3: 64}"], "a step has several micro-batches"),
        (["amp=fp16"], "amp: is fp16"),
        (["optimizer=muon"], "which may need all parameters in a step"),
        (["optimizer._target_=torch.optim.LBFGS"], "which may need all parameters in a step"),
        (["optimizer=custom", f"{OWN}.Whole"], "which may need all parameters in a step"),
        (["cluster.processes_per_node=2"], "strategy: is DDP"),
        (["cluster.processes_per_node=2", "strategy=zero1"], "strategy: is Zero1"),
    ],
)
def test_what_needs_all_gradients_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigErrors) as found:
        checked(EARLY, *overrides)
    assert said in str(found.value)
    checked(EARLY, "cluster.processes_per_node=2", "strategy=fsdp")
    checked(EARLY, "optimizer=sgd", f"{OWN}.Alone")
