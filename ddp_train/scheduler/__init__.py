"""Schedulers: the learning rate of every step. Third-party ones are named by `_target_`, and wrapped where the loop needs more."""

from ddp_train.scheduler.schedule import LRSchedule, constant, step, warmup_cosine, warmup_linear, warmup_stable_decay
