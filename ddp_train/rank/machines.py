"""The machines of a user's own torchrun: what differs between them is found before they train, as `launch/node` finds it for ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import Store

from ddp_train.distributed.store import wait_for
from ddp_train.errors import EnvironmentRefuses
from ddp_train.job import Job
from ddp_train.launch.node.differences import differences
from ddp_train.launch.node.facts import Facts, collect, of_a_command_line
from ddp_train.run_folder import failure
from ddp_train.system import torchrun_env

_LOOK_WITHIN_S = 60.0  # a second and a half, on a machine that does nothing else


def are_refused(store: Store, job: Job, words: Sequence[str]) -> bool:
    """Compare the machines, each of which has the config of rank 0, and say on each what is wrong, if anything is. Collective.

    Args:
        store: of this attempt.
        words: what was typed for this machine's torchrun: those of other machines than the first would have no effect.
    """
    rank, node, nodes = torchrun_env.rank(), torchrun_env.node_rank(), torchrun_env.num_nodes()
    if torchrun_env.local_rank() == 0:
        facts = collect(job.config, launch="", node=node, nodes=f"{nodes}", processes=torchrun_env.local_world_size())
        store.set(f"machine/{node}", of_a_command_line(facts, words).to_json())
    if rank == 0:
        first, *others = (Facts.from_json(wait_for(store, f"machine/{each}", within_s=_LOOK_WITHIN_S)) for each in range(nodes))
        found = [f"{facts.host}: {problem}" for facts in (first, *others) for problem in facts.problems]
        store.set("compared", "\n    ".join(found + [sentence for other in others for sentence in differences(first, other)]))
    text = wait_for(store, "compared", within_s=2 * _LOOK_WITHIN_S)
    error = EnvironmentRefuses(
        key="cluster",
        happened=f"the machines cannot train together:\n    {text}",
        expected="the same command, code, data and versions on each machine",
        fix="mend what is named, and start torchrun again on all machines",
    )
    if text and torchrun_env.local_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    if text and rank == 0:
        failure.from_exception(error, rank=rank, step=None).record(job.run_folder)
    return bool(text)
