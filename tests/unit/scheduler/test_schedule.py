"""Learning rate schedules at the points that matter."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from ddp_train.errors import ConfigError, RunError
from ddp_train.scheduler import LRSchedule, constant, step, warmup_cosine, warmup_linear, warmup_stable_decay
from ddp_train.scheduler.schedule import EveryEpoch, Plateau

PEAK = 0.5

ALL: dict[str, Callable[[torch.optim.Optimizer], LRSchedule]] = {
    "constant": lambda optimizer: constant(optimizer, warmup_steps=4),
    "warmup_cosine": lambda optimizer: warmup_cosine(optimizer, 20, warmup_steps=4),
    "warmup_linear": lambda optimizer: warmup_linear(optimizer, 20, warmup_steps=4),
    "warmup_stable_decay": lambda optimizer: warmup_stable_decay(optimizer, 20, warmup_steps=4, decay_steps=6),
    "step": lambda optimizer: step(optimizer, step_size=5, gamma=0.1),
}


def make_optimizer(lr: Any = PEAK) -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    return torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias], "lr": lr / 10}], lr=lr)


def rates(schedule: LRSchedule, steps: int) -> list[float]:
    """Return the first group's rate as a share of the peak in each of `steps` optimizer steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"] / PEAK)
        schedule.step()
    return found


def test_warm_up_rises_in_equal_parts_and_reaches_the_peak_after_warmup_steps() -> None:
    for name in ("constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"):
        assert rates(ALL[name](make_optimizer()), 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]), name


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    for schedule in (constant(make_optimizer()), warmup_cosine(make_optimizer(), 9), warmup_linear(make_optimizer(), 9)):
        assert rates(schedule, 1) == [1.0]


def test_constant_stays() -> None:
    assert rates(constant(make_optimizer(), warmup_steps=1), 5) == [0.5, 1, 1, 1, 1]


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_final_ratio() -> None:
    found = rates(warmup_cosine(make_optimizer(), 25, warmup_steps=4, final_ratio=0.1), 30)
    assert found[14] == pytest.approx(0.55)  # the middle of steps 4 and 24
    assert found[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert found[24:] == pytest.approx([0.1] * 6)  # the last step, and whatever comes after
    assert found[4:25] == sorted(found[4:25], reverse=True)


def test_linear_is_a_straight_line_to_the_final_ratio() -> None:
    found = rates(warmup_linear(make_optimizer(), 6, warmup_steps=1, final_ratio=0.2), 8)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_stable_decay_falls_during_the_last_decay_steps_alone() -> None:
    found = rates(warmup_stable_decay(make_optimizer(), 10, warmup_steps=1, decay_steps=4), 12)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0])


def test_stable_decay_does_not_depend_on_the_length_before_it_decays() -> None:
    short = rates(warmup_stable_decay(make_optimizer(), 10, warmup_steps=2, decay_steps=3), 7)
    assert short == rates(warmup_stable_decay(make_optimizer(), 1000, warmup_steps=2, decay_steps=3), 7)


def test_step_multiplies_by_gamma_every_step_size() -> None:
    assert rates(step(make_optimizer(), step_size=2, gamma=0.1), 5) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    with pytest.raises(ConfigError, match=r"scheduler\.step_size"):
        step(make_optimizer(), step_size=0)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_group_keeps_its_share_of_the_peak(make: Callable[[torch.optim.Optimizer], LRSchedule]) -> None:
    schedule = make(make_optimizer())
    for _ in range(22):
        first, second = schedule.get_last_lr()
        assert second == pytest.approx(first / 10)
        assert [group["lr"] for group in schedule.optimizer.param_groups] == [first, second]
        schedule.step()


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_resumed_schedule_continues_exactly(make: Callable[[torch.optim.Optimizer], LRSchedule], optimizer_first: bool) -> None:
    schedule = make(make_optimizer())
    rates(schedule, 7)
    file = io.BytesIO()
    torch.save({"schedule": schedule.state_dict(), "optimizer": schedule.optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = make(make_optimizer())
    if optimizer_first:
        resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    if not optimizer_first:
        resumed.optimizer.load_state_dict(state["optimizer"])
    assert rates(resumed, 15) == rates(schedule, 15)


def test_the_state_is_a_counter() -> None:
    for make in ALL.values():
        schedule = make(make_optimizer())
        schedule.step()
        assert schedule.state_dict() == {"last_epoch": 1}


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    lr = torch.tensor(PEAK)
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=lr, capturable=False, foreach=False)
    schedule = warmup_linear(optimizer, 3)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(PEAK / 2)
    schedule.step()
    assert lr.item() == 0


def test_a_skipped_optimizer_step_gives_no_warning() -> None:
    constant(make_optimizer()).step()  # pytest turns torch's "lr_scheduler.step() before optimizer.step()" into an error


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda optimizer: warmup_cosine(optimizer, 10, warmup_steps=11), "warm-up 11 steps are more than the run's 10"),
        (lambda optimizer: warmup_linear(optimizer, 10, warmup_steps=11), "warm-up 11 steps are more than the run's 10"),
        (lambda optimizer: warmup_stable_decay(optimizer, 10, warmup_steps=6, decay_steps=5), r"warm-up 6 \+ decay 5 steps .*\n.*\n.*=5,"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_a_config_error(make: Callable[[torch.optim.Optimizer], LRSchedule], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        make(make_optimizer())
    assert error.value.key == "scheduler.warmup_steps"


def test_the_shortest_runs_are_defined() -> None:
    assert rates(warmup_cosine(make_optimizer(), 1), 2) == pytest.approx([1.0, 0.1])
    assert rates(warmup_linear(make_optimizer(), 2, warmup_steps=2), 2) == pytest.approx([1 / 3, 2 / 3])
    assert rates(warmup_stable_decay(make_optimizer(), 2, warmup_steps=0, decay_steps=2), 2) == pytest.approx([0.5, 0.0])
    assert rates(warmup_stable_decay(make_optimizer(), 2, warmup_steps=0, decay_steps=0), 2) == [1.0, 1.0]


def every_epoch() -> EveryEpoch:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = EveryEpoch(StepLR(optimizer, step_size=1, gamma=0.5))
    optimizer.step()  # torch warns without
    return scheduler


def test_steps_change_nothing_and_epochs_do_once() -> None:
    scheduler = every_epoch()
    for _ in range(3):
        scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    for _ in range(2):
        scheduler.reach(1)
    assert scheduler.get_last_lr() == [0.5]
    scheduler.reach(3)  # the data went on while the run went back
    assert scheduler.get_last_lr() == [0.125]


def test_the_state_is_the_scheduler_s() -> None:
    first, second = every_epoch(), every_epoch()
    first.reach(2)
    second.scheduler.optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    for scheduler in (first, second):
        scheduler.reach(3)
    assert first.get_last_lr() == second.get_last_lr() == [0.125]


def plateau(lr: float = 1.0, **changes: Any) -> Plateau:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
    return Plateau(ReduceLROnPlateau(optimizer, **{"factor": 0.5, "patience": 1, **changes}), "loss")


def rates_after(scheduler: Plateau, losses: list[float]) -> list[Any]:
    """Return the rate after each evaluation."""
    found = []
    for loss in losses:
        scheduler.step()  # of the optimizer, in between
        scheduler.follow({"accuracy": 0.5, "loss": loss})
        found += scheduler.get_last_lr()
    return found


def test_the_rate_is_cut_when_the_metric_gets_no_better() -> None:
    assert rates_after(plateau(), [3.0, 2.0, 2.0, 2.0, 2.0, 1.0]) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("cut", range(6))
def test_counting_goes_on_after_a_resume(cut: int) -> None:
    losses = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    first, second = plateau(), plateau()
    before = rates_after(first, losses[:cut])
    second.scheduler.optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert before + rates_after(second, losses[cut:]) == rates_after(plateau(), losses)


def test_a_patience_and_a_rate_that_were_changed_count() -> None:
    first, second = plateau(), plateau(lr=4.0, patience=9)
    assert rates_after(first, [2.0, 2.0, 2.0]) == [1.0, 1.0, 0.5]
    second.scheduler.optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates_after(second, [2.0, 2.0, 2.0]) == [2.0, 2.0, 2.0]


def test_a_metric_that_the_evaluation_does_not_have_is_named() -> None:
    with pytest.raises(RunError, match=r"scheduler\.metric: the evaluation has no loss(.|\n)*one of accuracy"):
        plateau().follow({"accuracy": 1.0})
