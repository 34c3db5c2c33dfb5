"""Schedulers: the learning rate of every step. Others' are named by `_target_`; what they lack to be used here is added around them."""

from ddp_train.scheduler.schedule import LRSchedule, constant, step, warmup_cosine, warmup_linear, warmup_stable_decay

__all__ = ["LRSchedule", "constant", "step", "warmup_cosine", "warmup_linear", "warmup_stable_decay"]
