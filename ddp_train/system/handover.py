"""All environment variables by which one process of ours passes something to another.

Settings of a user are in the config, variables of torchrun in `torchrun_env.py`. This module is below all that write and read them.
"""

import os

PREFIX = "DDP_TRAIN_"  # what all of them begin with
JOB = "DDP_TRAIN_JOB"  # for an agent's ranks: the job that was composed for them, as JSON
GROUP = "DDP_TRAIN_GROUP"  # for the members of a sweep's group: its folder, with `socket`, and `run_folder`, the folder of the current job
AGENT = "DDP_TRAIN_AGENT"  # for the processes of an agent of ours: its pid. It may be gone when they have imported torch
NODE = "DDP_TRAIN_NODE"  # for the ranks of a run over several machines: the pid of this machine's node program, which outlives their agents
FACTS = "DDP_TRAIN_FACTS"  # for a machine's first rank that does not train: the file with its node program's facts; the rank removes it
STARTED = "DDP_TRAIN_STARTED"  # for the ranks of our own agents: when `ddp-train` was typed, in seconds since the epoch
FRESH_RANK = "DDP_TRAIN_FRESH_RANK"  # for a rank that is not forked: its end of the pipe to its member, and its place in the store
FORK_SERVER = "DDP_TRAIN_FORK_SERVER"  # for a fork server: the descriptor of its socket to its owner, and the owner's pid
LOADER_RANK = "DDP_TRAIN_RANK"  # for the server that loader workers are forked from: its rank's pid
CALLER = "DDP_TRAIN_CALLER"  # for a `ddp-train` started from Python: that process's pid, and the descriptor of the file for the outcome
ONE_GPU = "DDP_TRAIN_ONE_GPU"
"""For tests/gpu, which may have one GPU: `group` opens a process group for one rank, too; `shared` lets all ranks of a machine use its
first GPU, over gloo, as NCCL refuses two ranks on one."""


def shares_gpu() -> bool:
    """Tell whether all ranks of a machine use its first GPU."""
    return os.environ.get(ONE_GPU) == "shared"
