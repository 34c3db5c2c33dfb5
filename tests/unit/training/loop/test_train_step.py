"""One optimizer step: exact gradients whatever the split, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.distributed.world import World, alone
from ddp_train.interfaces import Ratio
from ddp_train.interfaces.strategy import local_rows
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop.train_step import GlobalUnits, clip, total_norm
from ddp_train.training.parts.components import Components
from ddp_train.training.record import log_window
from ddp_train.training.record.logged import Reduction
from tests.unit.parts import components, trainer
from tests.unit.sharded_tensors import example, rank_of, sharded_among
from tests.unit.training.host_reads import CountsHostReads
from tests.unit.training.ragged import Ragged, ragged_components


def gradient_of_one_step(parts: Components) -> Tensor:
    """Take one step with an optimizer that does nothing but note the gradient, and return it."""
    batch = parts.train_loader.order.batch_at(0)
    micro_batches = list(islice(parts.train_loader.micro_batches(0), parts.train_loader.grad_accum_steps))
    parts.trained_module.train()
    noted: list[Tensor] = []
    parts.optimizer.step = lambda: noted.extend(  # type: ignore[method-assign]
        parameter.grad.flatten().clone() for parameter in parts.model.parameters() if parameter.grad is not None
    )
    trainer(parts).train_step(micro_batches, global_batch_size=batch.size)
    return torch.cat(noted)


@pytest.mark.parametrize("accumulation", ["trainer.grad_accum_steps=null", "loader.micro_batch_size=8", "loader.micro_batch_size=7"])
def test_the_gradient_is_the_mean_over_the_global_batch_whatever_the_micro_batches(accumulation: str) -> None:
    parts = components("trainer.global_batch_size=30", accumulation)
    inputs, labels = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 30))
    expected = torch.autograd.grad(nn.functional.cross_entropy(parts.model(inputs), labels), list(parts.model.parameters()))
    found = gradient_of_one_step(parts)
    assert torch.allclose(found, torch.cat([gradient.flatten() for gradient in expected]), rtol=1e-5, atol=1e-7)


def test_masked_tokens_are_weighted_exactly_over_uneven_micro_batches() -> None:
    parts = ragged_components("trainer.global_batch_size=12", "loader.micro_batch_size=5")
    tokens, targets = parts.train_loader.source.batch(parts.train_loader.order.indices(0, 0, 12))
    mean = nn.functional.cross_entropy(parts.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected = torch.autograd.grad(mean, list(parts.model.parameters()))
    found = gradient_of_one_step(parts)
    assert parts.train_loader.grad_accum_steps == 3
    assert torch.allclose(found, torch.cat([gradient.flatten() for gradient in expected]), rtol=1e-5, atol=1e-7)


def test_a_step_in_which_nothing_counts_has_no_gradient_and_no_units() -> None:
    one_run = trainer(ragged_components("trainer.global_batch_size=2"))
    nothing, five = (MicroBatch(Ragged().batch(np.asarray([sample]))) for sample in (0, 5))
    norms = [one_run.train_step([batch], global_batch_size=1, measures_norm=True) for batch in (nothing, five)]
    assert norms[0] == 0
    assert norms[1] > 0
    assert sum(one_run.window.read(Reduction(alone())).num_units) == 5


def test_units_need_not_be_whole_numbers() -> None:
    def gradient(share: float) -> Tensor:
        parts = ragged_components("trainer.global_batch_size=12")
        loss: Any = parts.objective.loss
        scaled = lambda losses, mask, by_column: Ratio(losses * share, mask * share)  # noqa: E731
        parts.objective.loss = lambda model, batch: scaled(*loss(model, batch))  # type: ignore[method-assign]
        return gradient_of_one_step(parts)

    assert torch.allclose(gradient(2**-10), gradient(1.0), rtol=1e-5, atol=1e-7)  # all 30 targets together weigh less than 1


@dataclass(frozen=True, kw_only=True)
class Told(World):
    """Returns what is told: the sums over two ranks."""

    sums: list[Tensor] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        return self.sums.pop(0)


@pytest.mark.parametrize("is_per_rank", [False, True])
@pytest.mark.parametrize("counts", [[[3, 1, 0], [2, 7, 5]], [[0, 0, 4], [0, 1, 9]], [[0, 0, 0], [0, 0, 0]], [[3], [4]]])
def test_a_ratios_gradient_is_the_exact_mean_over_ranks_and_micro_batches(counts: list[list[int]], is_per_rank: bool) -> None:
    """Each micro-batch has losses of a sum of its own, with a stand-in where it counts nothing at all."""
    num = len(counts[0])
    sums = [torch.tensor(float(sum(row[0] for row in counts))), torch.tensor(float(sum(map(sum, counts))))]
    gradients = []
    for rank, row in enumerate(counts):
        world = Told(rank=rank, size=2, local_rank=rank, local_size=2, device=torch.device("cpu"), sums=[each.clone() for each in sums])
        units, gradient = GlobalUnits(world, is_per_rank=is_per_rank, global_batch_size=4, num_micro_batches=num), torch.zeros(())
        for place, count in enumerate(row):
            micro_batch = MicroBatch((torch.zeros(2),), is_stand_in=not count)
            units.add(micro_batch, torch.tensor(count or 99))
            gradient += (rank + place + 1.0 if count else 0.0) * units.factor
        correction = units.correction()
        gradients.append(gradient if correction is None else gradient * correction)
    losses = [sum(rank + place + 1.0 for place, count in enumerate(row) if count) for rank, row in enumerate(counts)]
    if is_per_rank:  # steps of each rank's own
        for gradient, loss, row in zip(gradients, losses, counts, strict=True):
            assert float(gradient) == pytest.approx(loss / (sum(row) or 1))
    else:  # of which the strategy takes the mean
        assert float(sum(gradients)) / 2 == pytest.approx(sum(losses) / (sum(map(sum, counts)) or 1))


def test_units_of_an_int_are_as_many_for_each_sample_and_cost_no_collective() -> None:
    world = Told(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
    units = GlobalUnits(world, is_per_rank=False, global_batch_size=10, num_micro_batches=2)
    for size in (3, 2):
        units.add(MicroBatch((torch.zeros(size),)), 7 * size)
    assert units.total == 70 and units.factor == 2 / 70 and units.correction() is None


def test_losses_of_samples_their_mean_and_a_ratio_give_one_gradient() -> None:
    def gradient(reduce: Callable[[Tensor], Any]) -> Tensor:
        parts = components("trainer.global_batch_size=30", "loader.micro_batch_size=7")
        losses = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
        parts.objective.loss = lambda model, batch: reduce(losses(model, batch))  # type: ignore[method-assign]
        return gradient_of_one_step(parts)

    expected = gradient(torch.mean)
    for reduce in (
        lambda losses: losses,
        lambda losses: Ratio(losses, len(losses)),
        lambda losses: Ratio(losses, torch.ones_like(losses)),
        lambda losses: Ratio(losses.sum(), torch.tensor(len(losses))),
    ):
        torch.testing.assert_close(gradient(reduce), expected, rtol=1e-5, atol=1e-7)


class _Doubled(torch.autograd.Function):
    """A loss of somebody's own, whose backward changes what it is given."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return 2 * loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].mul_(2)


def test_a_backward_that_changes_its_gradient_in_place_spoils_no_later_one() -> None:
    def gradient(change: Callable[[Tensor], Tensor]) -> Tensor:
        parts = components("trainer.global_batch_size=30", "loader.micro_batch_size=7")
        loss = parts.objective.loss
        parts.objective.loss = lambda model, batch: change(loss(model, batch))  # type: ignore[method-assign, arg-type]
        return gradient_of_one_step(parts)

    assert torch.equal(gradient(_Doubled.apply), gradient(lambda loss: 2 * loss))


def test_an_optimizer_that_forgets_in_its_own_way_is_asked_to() -> None:
    parts, asked = components("trainer.max_steps=3"), list[bool]()
    kind = type(parts.optimizer)

    class Own(kind):  # type: ignore[misc,valid-type]
        def zero_grad(self, set_to_none: bool = True) -> None:
            asked.append(set_to_none)
            super().zero_grad(set_to_none)

    trainer(parts).train()
    assert all(parameter.grad is None for parameter in parts.model.parameters())
    parts = components("trainer.max_steps=3")
    parts.optimizer.__class__ = Own
    trainer(parts).train()
    assert asked == 3 * [True]


@dataclass(frozen=True, kw_only=True)
class Counting(World):
    """One rank that notes the collectives beside DDP's."""

    events: list[str] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        self.events.append("sum")
        return super().sum(values)


@pytest.mark.parametrize("is_known", [True, False])
def test_units_are_added_up_after_the_first_forward_and_the_last_backward_and_never_where_they_are_known(is_known: bool) -> None:
    parts = (
        components("trainer.global_batch_size=12", "loader.micro_batch_size=5")
        if is_known
        else ragged_components("trainer.global_batch_size=12", "loader.micro_batch_size=5")
    )
    world = Counting(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    parts.turns.plain.wrapped.register_forward_hook(lambda module, inputs, outputs: world.events.append("forward"))
    micro_batches = list(islice(parts.train_loader.micro_batches(0), parts.train_loader.grad_accum_steps))
    trainer(parts, world=world).train_step(micro_batches, global_batch_size=12)
    forwards = ["forward"] * 3
    assert world.events == (forwards if is_known else ["forward", "sum", "forward", "forward", "sum"])


@pytest.mark.parametrize("clip", [None, 1.0])
def test_between_log_steps_nothing_is_read_from_the_device(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_window, "is_host", lambda device: False)  # as on a GPU
    parts = components("trainer.max_steps=10")
    micro_batches = parts.train_loader.micro_batches(0)
    parts.trained_module.train()
    one_run = trainer(parts, clip_grad_norm=clip)
    one_step = lambda: one_run.train_step([next(micro_batches)], global_batch_size=32)  # noqa: E731
    parts.optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign]  # torch's own business
    one_step()
    with CountsHostReads() as counter:
        one_step()
        one_step()
    assert counter.reads == []
    with CountsHostReads() as counter:
        one_run.window._losses.values[0].item()
    assert counter.reads  # the counter can count


def test_half_precision_with_a_scaler_clips_what_it_would_clip_without() -> None:
    """On CPU float16 is refused by the config check, not by the loop: the scaler's order of steps is tested here."""
    parts, scaled = components("trainer.clip_grad_norm=0.1"), components("trainer.clip_grad_norm=0.1")
    scaled = replace(scaled, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    for each in (parts, scaled):
        micro_batch = next(each.train_loader.micro_batches(0))
        each.trained_module.train()
        trainer(each, clip_grad_norm=0.1).train_step([micro_batch], global_batch_size=32)
    for left, right in zip(parts.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-7)


@dataclass(frozen=True, kw_only=True)
class Adding(World):
    """Adds what the other ranks have told before."""

    told: list[Tensor] = field(default_factory=list)

    def sum(self, values: Tensor) -> Tensor:
        self.told.append(values.clone())
        return torch.stack(self.told).sum(dim=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_norm_of_gradients_that_are_cut_is_that_of_the_whole_ones(replicas: int) -> None:
    whole, other, told = example(5, 3), example(4), list[Tensor]()
    expected = nn.utils.get_total_norm([whole, other])
    for rank in range(4):
        with rank_of(rank, 4, replicas=replicas) as mesh:
            world = Adding(rank=rank, size=4, local_rank=rank, local_size=4, device=torch.device("cpu"), told=told)
            gradients = [sharded_among(mesh, whole), other.clone()]
            norm = total_norm(gradients, world)
            clip(gradients, 1.0, expected)
            assert local_rows(gradients[1]).norm() == pytest.approx(float(other.norm() / expected), rel=1e-5)
            assert local_rows(gradients[0]).abs().sum() <= whole.abs().sum() / expected
    assert norm == pytest.approx(float(expected), rel=1e-6)  # the last rank has heard all


def test_a_whole_one_is_as_torch_has_it_to_the_bit() -> None:
    parameters = [nn.Parameter(example(3, 2)), nn.Parameter(example(7))]
    for limit in (0.5, 1e6):
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        gradients = [parameter.detach().clone() for parameter in parameters]
        norm = total_norm(gradients, alone())
        assert norm == nn.utils.clip_grad_norm_(parameters, limit)
        clip(gradients, limit, norm)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]
