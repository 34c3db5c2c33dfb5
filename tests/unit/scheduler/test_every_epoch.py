"""A scheduler that counts epochs has the rate of the one that the data is in."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ddp_train.scheduler.every_epoch import EveryEpoch


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
