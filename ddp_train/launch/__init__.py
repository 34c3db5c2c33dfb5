"""Where agents are started: one module per place. Imports no torch.

`run` starts a job that is composed already; `slots` are where the jobs of a sweep run; `join` starts this node's agent of a run that global
rank 0 composes.
"""

from ddp_train.launch.local import run
from ddp_train.launch.torchrun import join
from ddp_train.launch.warm_group import slots

__all__ = ["join", "run", "slots"]
