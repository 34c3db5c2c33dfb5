"""Turns: each trains its own parameters by its own loss, whatever the accumulation; a checkpoint and the guards know of nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_train.distributed.world import World, alone
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Batch, Goal, TurnObjective
from ddp_train.training.parts.components import Components
from ddp_train.training.record.records import Record
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState, WindowSums
from tests.unit.parts import ChosenStop, components, saved, trainer

HERE = "tests.unit.training.parts.test_turns"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 768)
        self.discriminator = nn.Sequential(nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, 1))


class Adversarial(TurnObjective):
    """A GAN that makes its noise of the labels, so that no split of a batch changes it."""

    goals: Mapping[str, Goal] = {}
    turns: Mapping[str, Sequence[str]] = {"discriminator": ["discriminator"], "generator": ["generator"]}

    def turn_loss(self, model: Any, batch: Batch, turn: str) -> Tensor:
        real, fake = batch[0].flatten(1), self.make(model, batch)
        if turn == "generator":
            return F.softplus(-model.discriminator(fake))[:, 0]
        return (F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(fake.detach()))).mean()

    @staticmethod
    def make(model: Any, batch: Batch) -> Tensor:
        made: Tensor = model.generator(F.one_hot(batch[1] % 4, 4).float())
        return made


class Rarely(Adversarial):
    def turns_at(self, step: int) -> Sequence[str]:
        return ["discriminator", "generator"] if step % 2 else ["discriminator"]


class Forgetful(Adversarial):
    turns: Mapping[str, Sequence[str]] = {"discriminator": ["discriminator"]}


class Actors(nn.Module):
    """Actor and critic on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(768, 8)
        self.critic, self.actor = nn.Linear(8, 1), nn.Linear(8, 10)


class ActorCritic(Adversarial):
    turns: Mapping[str, Sequence[str]] = {"critic": ["trunk", "critic"], "actor": ["trunk", "actor"]}

    def turn_loss(self, model: Any, batch: Batch, turn: str) -> Tensor:
        seen, reward = model.trunk(batch[0].flatten(1)).relu(), batch[1].float() / 10
        value = model.critic(seen)[:, 0]
        if turn == "critic":
            return (value - reward).square()
        chosen = model.actor(seen).log_softmax(dim=1).gather(1, batch[1][:, None])[:, 0]
        return -chosen * (reward - value.detach())


class Bad(Adversarial):
    """Its discriminator's loss is lost in some steps."""

    lost: Iterator[bool] = iter(())

    def turn_loss(self, model: Any, batch: Batch, turn: str) -> Tensor:
        loss = super().turn_loss(model, batch, turn)
        return loss * float("nan") if turn == "discriminator" and next(self.lost, False) else loss


class RarelyBad(Bad, Rarely):
    pass


def gan(*overrides: str, objective: str = "Adversarial", model: str = "Pair", steps: int = 4) -> Components:
    clean = ["~model.width", "~model.depth", "~model.image_shape", "~model.num_classes", "~objective.label_smoothing"]
    mine = [f"model._target_={HERE}.{model}", f"objective._target_={HERE}.{objective}", f"trainer.max_steps={steps}"]
    return components(*mine, *clean, "scheduler=constant", "trainer.global_batch_size=32", *overrides)


def trained(parts: Components, **changes: Any) -> tuple[dict[str, Tensor], list[Record]]:
    records: list[Record] = []
    torch.manual_seed(0)
    trainer(parts, write=records.append, **{"sanity_check": True, **changes}).train()
    return {name: value.clone() for name, value in parts.model.state_dict().items()}, [each for each in records if each["split"] == "train"]


def by_hand(steps: int) -> dict[str, Tensor]:
    """Train the same GAN as everybody writes it: two optimizers, in turn."""
    parts, objective = gan(), Adversarial()
    model: Any = parts.model
    optimizers = {name: torch.optim.AdamW(getattr(model, name).parameters(), lr=1e-3, betas=(0.9, 0.95)) for name in objective.turns}
    for name, optimizer in optimizers.items():
        weights = list(getattr(model, name).parameters())
        optimizer.param_groups.clear()
        for decay, dims in ((0.1, 2), (0.0, 1)):
            optimizer.add_param_group({"params": [each for each in weights if each.ndim == dims], "weight_decay": decay})
    stream = parts.train_loader.micro_batches(0)
    for _ in range(steps):
        batch = next(stream).batch
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            loss = objective.turn_loss(model, batch, name).mean()
            gradients = torch.autograd.grad(loss, list(getattr(model, name).parameters()))
            for parameter, gradient in zip(getattr(model, name).parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    return dict(model.state_dict())


def close(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-6) for name in left)


@pytest.mark.parametrize("overrides", [[], ["loader.micro_batch_size=8"]], ids=["one micro-batch", "four"])
def test_turns_train_as_two_optimizers_by_hand_do(overrides: list[str]) -> None:
    weights, records = trained(gan(*overrides))
    assert close(weights, by_hand(4))
    for record in records:
        assert record["loss_discriminator"] + record["loss_generator"] == pytest.approx(record["loss"])


def test_a_turn_touches_no_other_turns_parameters_and_an_objective_chooses_its_turns() -> None:
    parts = gan(objective="Rarely", steps=1)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    after, (record,) = trained(parts)
    assert all(torch.equal(before[name], after[name]) == name.startswith("generator") for name in after)
    assert "loss_generator" not in record and record["loss_discriminator"] == pytest.approx(record["loss"])
    assert all(parameter.requires_grad for parameter in parts.model.parameters())
    after, records = trained(gan(objective="Rarely", steps=2))
    assert not torch.equal(before["generator.weight"], after["generator.weight"])
    assert "loss_generator" in records[1]


def test_several_optimizers_have_each_a_part() -> None:
    each = (
        "{generator: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}, discriminator: {_target_: torch.optim.Adam, _partial_: true}}"
    )
    parts = gan("optimizer=several", f"optimizer.parts={each}")
    assert [type(part).__name__ for part in parts.optimizer.optimizers] == ["SGD", "Adam"]  # type: ignore[attr-defined]
    trained(parts)
    assert all("exp_avg" in parts.optimizer.state[parameter] for parameter in parts.model.discriminator.parameters())  # type: ignore[operator, union-attr]
    with pytest.raises(ConfigError, match="2 parameters are in no part: generator"):
        gan("optimizer=several", "optimizer.parts={discriminator: {_target_: torch.optim.Adam, _partial_: true}}")


def test_killed_and_resumed_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    whole, _ = trained(gan(steps=6))
    parts = gan(steps=3)
    trained(parts)
    checkpoint = saved(tmp_path, 3, parts)
    again, state = gan(steps=6), TrainState()
    start_from(checkpoint, again, state, alone())
    trainer(again, state).train()
    assert all(torch.equal(value, whole[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_turn_that_is_not_finite_ends_its_step(monkeypatch: pytest.MonkeyPatch, fused: str) -> None:
    monkeypatch.setattr(Bad, "lost", iter([False, True]))  # step 1, step 2
    parts = gan(f"optimizer.fused={fused}", objective="Bad", steps=2)
    weights, records = trained(parts, on_nonfinite="skip", sanity_check=False)
    monkeypatch.setattr(Bad, "lost", iter(()))
    once, _ = trained(gan(f"optimizer.fused={fused}", objective="Bad", steps=1), sanity_check=False)
    assert [record["skipped_steps"] for record in records] == [0, 1]
    assert all(torch.equal(value, once[name]) for name, value in weights.items())
    assert "loss_discriminator" not in records[1]  # nothing of the window counts


def losses_of_turns(records: list[Record]) -> list[Any]:
    return [(record["step"], record["loss"], record.get("loss_discriminator"), record.get("loss_generator")) for record in records]


def test_the_losses_of_turns_are_those_of_the_steps_that_count_and_took_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Step 3 is skipped; the generator takes every second step. A checkpoint between two records changes none of it."""

    def run(parts: Components, log_every_steps: int, first: int = 0, **changes: Any) -> list[Record]:
        monkeypatch.setattr(Bad, "lost", iter([step == 3 for step in range(first + 1, 7)]))
        records: list[Record] = []
        trainer(parts, on_nonfinite="skip", write=records.append, log_every_steps=log_every_steps, **changes).train()
        return [each for each in records if each["split"] == "train"]

    alone_, whole = run(gan(objective="RarelyBad", steps=6), 1), run(gan(objective="RarelyBad", steps=6), 6)
    counted = [each for each in alone_ if each["step"] != 3]
    (record,) = whole
    assert record["skipped_steps"] == 1
    for turn, steps in (("discriminator", [1, 2, 4, 5, 6]), ("generator", [2, 4, 6])):
        losses = [each[f"loss_{turn}"] for each in counted if each["step"] in steps]
        assert len(losses) == len(steps) and record[f"loss_{turn}"] == pytest.approx(sum(losses) / len(losses))

    windows: list[WindowSums] = []
    parts = gan(objective="RarelyBad", steps=6)
    run(parts, 6, stop=ChosenStop(4), save=windows.append)
    checkpoint = saved(tmp_path, 4, parts)
    again, state = gan(objective="RarelyBad", steps=6), TrainState()
    start_from(checkpoint, again, state, alone())
    state.saved_window = windows[-1]
    assert losses_of_turns(run(again, 6, 4, state=state)) == losses_of_turns(whole)
    shared = [WindowSums.merged([windows[-1]] * 2, is_main=is_main) for is_main in (True, False)]
    assert shared[0].turn_losses["generator"][1] == 2 * windows[-1].turn_losses["generator"][1] and not shared[1].turn_losses
    assert all(each.turns_of_steps == windows[-1].turns_of_steps for each in shared)


def test_the_name_of_a_turns_loss_is_taken() -> None:
    with pytest.raises(ValueError, match="has a 'loss_generator' already"):
        trainer(gan()).logged.add("loss_generator", 1.0)


def test_clipping_is_by_the_gradient_of_the_turn() -> None:
    seen = []
    parts = gan(steps=2)
    step = parts.optimizer.step

    def look(*arguments: Any) -> None:
        gradients = [parameter.grad for parameter in parts.model.parameters() if parameter.grad is not None]
        seen.append((len(gradients), float(nn.utils.get_total_norm(gradients))))
        step(*arguments)

    parts.optimizer.step = look  # type: ignore[assignment, method-assign]
    trained(parts, clip_grad_norm=1e-3)
    assert [count for count, _ in seen] == [4, 2, 4, 2]
    assert all(norm == pytest.approx(1e-3, rel=1e-2) for _, norm in seen)


def test_parameters_in_no_turn_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 parameters are in no turn of Forgetful: generator\.weight"):
        gan(objective="Forgetful")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Open a process group that has this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("overrides", [[], ["loader.micro_batch_size=8"]], ids=["one micro-batch", "four"])
def test_each_turn_reduces_its_own_gradients(group_of_one: None, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of two ranks: DDP waits for no gradient of another turn, and finds all of its own."""
    expected, _ = trained(gan(*overrides))
    parts = gan(*overrides)
    reduced = {name: turn.wrapped._get_ddp_logging_data()["num_parameter_tensors"] for name, turn in parts.turns.by_name.items()}  # type: ignore[operator]
    assert reduced == {"discriminator": 4, "generator": 2}
    world = World(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value])
    weights, _ = trained(parts, world=world)  # with Adam gradients of twice the size make the same steps, but for eps
    assert all(torch.allclose(weights[name], expected[name], atol=1e-4) for name in weights)


def test_turns_may_share_parameters(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of DDP's reducers have hooks on the trunk, and each minds its own turn."""
    shared = {"objective": "ActorCritic", "model": "Actors"}
    expected, records = trained(gan("loader.micro_batch_size=8", **shared))  # type: ignore[arg-type]
    assert {"loss_critic", "loss_actor"} <= records[0].keys()
    parts = gan("loader.micro_batch_size=8", **shared)  # type: ignore[arg-type]
    world = World(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value])
    weights, _ = trained(parts, world=world)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-4) for name in weights)
