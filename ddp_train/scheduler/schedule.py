"""The learning rate of every step, as a factor of the optimizer's rate; and torch's schedulers that change it at other times.

Steps count from 0: the first optimizer step uses `factor(0)`, the last one `factor(total_steps - 1)`; `step` is called after each.
Warm-up rises in equal parts from `1 / (warmup_steps + 1)`, so that no step is wasted at rate 0; step `warmup_steps` is the first at peak.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_train.errors import ConfigError, RunError

_COUNTED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # by ReduceLROnPlateau


class LRSchedule(LRScheduler):
    """Set each parameter group's rate to its initial one times `factor(step)`.

    Differs from torch's LambdaLR in two ways. Its state is one counter, so that a checkpoint holds no function, and a rate changed between
    stop and resume counts. And `step` does not warn when the optimizer has not stepped: float16 that overflows in the first step skips it.

    Args:
        optimizer: its groups' `lr` are the peaks.
        factor: of the number of steps taken.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self.factor = factor
        super().__init__(optimizer)  # notes the initial rates and calls step() once: last_epoch becomes 0

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        self._apply()

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [initial * factor for initial in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):  # a capturable optimizer's graph reads this very tensor
                group["lr"].fill_(float(lr))
            else:
                group["lr"] = lr


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LRSchedule:
    return LRSchedule(optimizer, lambda step: _warmup(step, warmup_steps))


def warmup_cosine(optimizer: Optimizer, total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.1) -> LRSchedule:
    """Fall along half a cosine from the peak to `final_ratio` of it.

    Source: Loshchilov & Hutter 2016, arXiv:1608.03983 (SGDR, without restarts).
    """

    def fall(progress: float) -> float:
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return _falling(optimizer, total_steps, warmup_steps, fall)


def warmup_linear(optimizer: Optimizer, total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> LRSchedule:
    """Fall in a straight line from the peak to `final_ratio` of it.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.2 (BERT).
    """
    return _falling(optimizer, total_steps, warmup_steps, lambda progress: 1 - (1 - final_ratio) * progress)


def warmup_stable_decay(
    optimizer: Optimizer, total_steps: int, *, warmup_steps: int, decay_steps: int, final_ratio: float = 0.0
) -> LRSchedule:
    """Stay at the peak, and fall in a straight line to `final_ratio` of it during the last `decay_steps`.

    Unlike with a cosine, a checkpoint from the stable part can start a run of any other length.

    Source: Hu et al. 2024, arXiv:2404.06395 (MiniCPM, WSD; its decay is exponential);
        Haegele et al. 2024, arXiv:2405.18392 (linear cooldown).
    """
    return _falling(optimizer, total_steps, warmup_steps, lambda progress: 1 - (1 - final_ratio) * progress, decay_steps=decay_steps)


def step(optimizer: Optimizer, *, step_size: int, gamma: float = 0.1) -> LRSchedule:
    """Multiply the rate by `gamma` every `step_size` optimizer steps."""
    if step_size < 1:
        raise ConfigError(key="scheduler.step_size", happened=f"is {step_size}", expected="at least 1 step", fix="scheduler.step_size=1000")
    return LRSchedule(optimizer, lambda step: gamma ** (step // step_size))


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _falling(
    optimizer: Optimizer, total_steps: int, warmup_steps: int, fall: Callable[[float], float], *, decay_steps: int | None = None
) -> LRSchedule:
    """Follow `fall` (of a progress from 0 to 1) from the peak to the end, for `decay_steps`, or from the end of the warm-up."""
    room = total_steps - (decay_steps or 0)
    if warmup_steps > room:
        decay = f" + decay {decay_steps}" if decay_steps else ""
        happened = f"warm-up {warmup_steps}{decay} steps are more than the run's {total_steps}"
        expected = "together at most the number of optimizer steps"
        fix = f"scheduler.warmup_steps={max(0, room)}, or a longer run (trainer.max_steps)"
        raise ConfigError(key="scheduler.warmup_steps", happened=happened, expected=expected, fix=fix)
    last_peak = warmup_steps if decay_steps is None else total_steps - decay_steps - 1

    def factor(step: int) -> float:
        if step <= last_peak:
            return _warmup(step, warmup_steps)
        # At most 1: the scheduler also steps once after the last optimizer step.
        return fall(min(1.0, (step - last_peak) / max(1, total_steps - 1 - last_peak)))

    return LRSchedule(optimizer, factor)


class EveryEpoch:
    """Steps a scheduler of torch once after each epoch of the data (`scheduler.every=epoch`).

    The data's position decides, not the number of calls: a rewind whose data goes on, or another batch size, gets the rate of its epoch.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        """Do nothing: the rate does not change with an optimizer step."""

    def reach(self, epoch: int) -> None:
        while self.scheduler.last_epoch < epoch:
            self.scheduler.step()

    def get_last_lr(self) -> list[float | Tensor]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.scheduler.load_state_dict(state_dict)


class Plateau:
    """Feeds torch's ReduceLROnPlateau with one metric after each evaluation.

    Its state holds the counters, and no settings: a patience or a rate that is changed between stop and resume takes effect.

    Args:
        scheduler: a new one, before its first step.
        metric: its name in the evaluation.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str) -> None:
        self.scheduler, self.metric = scheduler, metric
        self._initial = [float(group["lr"]) for group in scheduler.optimizer.param_groups]

    def step(self) -> None:
        """Do nothing: the rate does not change with an optimizer step."""

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Step the scheduler with the metrics of an evaluation, the same on all ranks."""
        if self.metric not in metrics:
            happened = f"the evaluation has no {self.metric}, which the scheduler follows"
            raise RunError(key="scheduler.metric", happened=happened, expected=f"one of {', '.join(metrics)}")
        self.scheduler.step(metrics[self.metric])

    def get_last_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self.scheduler, name) for name in _COUNTED}, "base_lrs": self._initial}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the counters. Called after the optimizer's state is loaded: where the config's rates have changed, its rates are scaled."""
        for name in _COUNTED:
            setattr(self.scheduler, name, state_dict[name])
        for group, now, then in zip(self.scheduler.optimizer.param_groups, self._initial, state_dict["base_lrs"], strict=True):
            if now != then:
                group["lr"] = float(group["lr"]) * now / then
