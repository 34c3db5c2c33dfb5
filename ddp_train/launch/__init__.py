"""From a job to processes on this machine. Imports no torch; only an agent does, in the process forked for it.

local          `run`: one agent, for a job that is composed already
torchrun       `join`: this node's agent of a run on several nodes, which global rank 0 composes
warm_group     `slots`: agents whose processes serve one job of a sweep after another
sweep          which job of a sweep runs in which slot, and when; slot: what a slot has to offer
agent_process  an agent as a child of this process; stopping: what this process does with stop signals meanwhile
"""

from ddp_train.launch.local import run
from ddp_train.launch.torchrun import join
from ddp_train.sweep.warm_group import slots

__all__ = ["join", "run", "slots"]
