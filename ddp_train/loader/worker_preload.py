"""Settings of the server that loader workers are forked from, and so of every worker; it imports this module first."""

import os

from ddp_train.system import process_env
from ddp_train.system.process import die_with_parent, keep_freed

_rank = os.environ.get(process_env.LOADER_RANK)
die_with_parent(int(_rank) if _rank else None)  # with the rank, also while it imports torch, and if it has gone already
keep_freed(os.environ)  # a worker allocates the same batch again and again
