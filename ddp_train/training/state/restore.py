"""Continuing from a checkpoint when a run begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.folder import newest_good, remove_debris, set_aside_after
from ddp_train.checkpoint.verify import verify
from ddp_train.distributed.world import World
from ddp_train.job import Job
from ddp_train.training.parts.components import Components
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.data_identity import require_same
from ddp_train.training.state.saved_state import load
from ddp_train.training.train_state import TrainState


def resume(job: Job, components: Components, state: TrainState, world: World, *, moves: Callable[[], None]) -> list[str] | None:
    """Continue from the given or the newest good checkpoint. Collective.

    Returns:
        What differs in the data since then, and was accepted; None: there is no checkpoint.
    """
    if job.checkpoint is None:
        chosen = newest_good(job.run_folder.checkpoints, world, moves=moves)
    else:
        given, check = Path(job.checkpoint), partial(verify, moves=moves)
        chosen = world.from_main(catalog.find(given, check, key="resume") if world.is_main else None)
    accepted = require_same(chosen, components.identity, world, job.config) if chosen else []
    if world.is_main:
        remove_debris(job.run_folder.checkpoints)
        for name in set_aside_after(chosen.parent if chosen else job.run_folder.checkpoints, chosen):
            print(f"a checkpoint of a later step, or of another run, is now {name}", flush=True)
    if chosen is None:
        if world.is_main and job.run_folder.metrics.exists():
            print("resumed  from the start: there is no good checkpoint", flush=True)
        return None
    components.rebuild_buckets(world)
    if not load(chosen, components, state, world, moves=moves):
        seed_all(job.config.seed + state.step, rank=world.rank)  # another number of ranks: new streams, not those of step 0 again
    return accepted
