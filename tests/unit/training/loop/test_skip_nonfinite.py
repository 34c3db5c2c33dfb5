"""A step that is skipped leaves everything as if its batch had not been, on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_train.amp import Amp
from ddp_train.distributed.world import alone
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.loop.skip_nonfinite import SkippingGuard
from ddp_train.training.parts.components import Components
from ddp_train.training.record import log_window
from ddp_train.training.record.log_window import LogWindow
from ddp_train.training.record.logged import Reduction
from tests.unit.parts import components, trainer
from tests.unit.training.host_reads import CountsHostReads

OPTIMIZERS = {
    "sgd": ["optimizer=sgd", "optimizer.lr=0.1"],
    "fused sgd": ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.fused=true"],
    "adamw": ["optimizer=adamw", "optimizer.fused=false"],
    "fused adamw": ["optimizer=adamw"],
}


class Normed(nn.Module):
    """Has buffers that a step changes: batch norm's, and one of its own."""

    def __init__(self, image_shape: list[int], num_classes: int, **unused: Any) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(math.prod(image_shape)), nn.Linear(math.prod(image_shape), num_classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.norm(inputs.flatten(1)))  # type: ignore[no-any-return]


def parts_of(*overrides: str) -> Components:
    return components("model._target_=tests.unit.training.loop.test_skip_nonfinite.Normed", "scheduler=constant", *overrides)


def everything(parts: Components) -> dict[str, Any]:
    """Return all that a step changes, as plain values."""
    state = parts.optimizer.state_dict()["state"]
    values = {f"{place}.{name}": value for place, each in state.items() for name, value in each.items() if value is not None}
    return {name: torch.as_tensor(value).clone() for name, value in {**parts.model.state_dict(), **values}.items()}


def run(parts: Components, spoiled: set[int], *, without: bool, clip: float | None = None) -> LogWindow:
    """Take ten steps of two micro-batches each; spoil some batches, or leave them out."""
    one_run = trainer(parts, clip_grad_norm=clip, on_nonfinite="skip")
    batches = parts.train_loader.micro_batches(0)
    parts.trained_module.train()
    for step in range(10):
        micro_batches = [next(batches), next(batches)]
        if step in spoiled:
            if without:
                continue
            inputs, targets = micro_batches[0].batch
            micro_batches[0] = MicroBatch((torch.full_like(inputs, float("nan")), targets))
        one_run.train_step(micro_batches, global_batch_size=32)
    return one_run.window


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_skipped_step_changes_nothing(optimizer: str, clip: float | None) -> None:
    spoiled = {0, 1, 4, 9}  # the first, too: fused SGD has no momentum yet
    some, none = parts_of(*OPTIMIZERS[optimizer]), parts_of(*OPTIMIZERS[optimizer])
    window = run(some, spoiled, without=False, clip=clip)
    run(none, spoiled, without=True, clip=clip)
    left, right = everything(some), everything(none)
    assert left.keys() == right.keys()
    assert any(name.endswith(("momentum_buffer", "exp_avg")) for name in left)
    assert left["calls"] == 12
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert {place for place, norm in enumerate(window.read(Reduction(alone())).norms) if not math.isfinite(norm)} == spoiled
    assert some.scheduler.last_epoch == 10  # a skipped step is a step of the schedule


@pytest.mark.parametrize("optimizer", ["fused sgd", "fused adamw"])
def test_a_scaler_and_a_guard_together_skip_once(optimizer: str) -> None:
    """float16 on CPU is refused by the config check, not by the loop."""
    some, none = (parts_of(*OPTIMIZERS[optimizer]) for _ in range(2))
    some, none = (
        replace(parts, amp=Amp("float16"), scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000))
        for parts in (some, none)
    )
    run(some, {0, 4}, without=False, clip=1.0)
    run(none, {0, 4}, without=True, clip=1.0)
    assert some.scaler.get_scale() == none.scaler.get_scale() / 4
    left, right = everything(some), everything(none)
    assert all(torch.allclose(left[name].float(), right[name].float(), rtol=1e-2, atol=1e-4) for name in left)
    assert all(value.isfinite().all() for value in left.values())


def test_a_loss_that_is_lost_without_its_gradient_is_skipped_too() -> None:
    """An infinite loss can have finite gradients on its rank; the others do not see it unless it spoils them."""
    parts = components("optimizer=sgd", "scheduler=constant")
    loss = parts.objective.loss
    parts.objective.loss = lambda model, batch: loss(model, batch) + float("inf")  # type: ignore[method-assign]
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    batch = next(parts.train_loader.micro_batches(0))
    trainer(parts, on_nonfinite="skip").train_step([batch], global_batch_size=32)
    assert all(torch.equal(left, right) for left, right in zip(before, parts.model.parameters(), strict=True))


def test_nothing_is_read_from_the_device_with_a_fused_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_window, "is_host", lambda device: False)  # as on a GPU
    parts = components("optimizer=adamw")
    one_run, batches = trainer(parts, on_nonfinite="skip"), parts.train_loader.micro_batches(0)

    def step() -> None:
        one_run.train_step([next(batches)], global_batch_size=32)

    step()
    reads = list[str]()
    taken = parts.optimizer.step

    def uncounted(*args: Any, **kwargs: Any) -> None:  # torch's own business
        reads.extend(counter.reads)
        taken(*args, **kwargs)
        counter.reads.clear()

    parts.optimizer.step = uncounted  # type: ignore[method-assign]
    with CountsHostReads() as counter:
        step()
        step()
    assert reads + counter.reads == []


class _Scaler:
    """A loss scaler that is on, whose note on overflows lies on the CPU, as where the optimizer steps shards in the host's memory."""

    def __init__(self) -> None:
        self.found = torch.zeros(())

    def is_enabled(self) -> bool:
        return True

    def _found_inf_per_device(self, optimizer: object) -> dict[str, Tensor]:
        return {"cpu": self.found}

    def step(self, optimizer: object) -> None:
        """Take no step."""


def test_a_norm_on_a_gpu_is_noted_for_an_optimizer_that_steps_on_the_host() -> None:
    """Without a GPU by torch's fake tensors, which fail as it would."""
    model = nn.Linear(2, 2)
    guard = SkippingGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard._skips_on_device, guard._taken = True, {None}
    with FakeTensorMode(allow_non_fake_inputs=True):
        scaler: Any = _Scaler()
        guard.step(torch.optim.SGD([torch.zeros(1)]), scaler, torch.empty((), device="cuda"))
