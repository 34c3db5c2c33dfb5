"""Going back to the newest checkpoint while the data goes on: past the batches in which the loss was lost.

Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (PaLM: spikes come from a batch and a state of the weights together).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.folder import newest_good, remove_debris, set_aside_after
from ddp_train.checkpoint.verify import verify
from ddp_train.distributed.world import World
from ddp_train.errors import RunError
from ddp_train.job import Job
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training import predictions
from ddp_train.training.components import Components
from ddp_train.training.loss_monitor import Event, Rewind
from ddp_train.training.saved_state import load
from ddp_train.training.seeding import seed_all
from ddp_train.training.state import Jump, TrainState
from ddp_train.training.trainer import rebuild_buckets

_MOST_IN_VAIN = 3  # rewinds to the same checkpoint


class RewindError(RunError):
    """The run cannot go back any more."""


def rewind(
    found: Rewind,
    run_folder: RunFolder,
    components: Components,
    state: TrainState,
    world: World,
    *,
    tell: Callable[[Event, str], None],
    moves: Callable[[], None] = lambda: None,
) -> None:
    """Load the newest good checkpoint into the components and the state, but for the position in the data. Collective.

    Args:
        moves: called while this rank reads, which may take longer than a step may.

    Raises:
        RewindError: there is no checkpoint, or going back to it has not helped three times.
    """
    tell(found.event, found.happened)
    chosen, refused = newest_good(run_folder.checkpoints, world, moves=moves)
    if world.is_main:
        print(*(f"{line}\n" for line in refused), sep="", end="", flush=True)
    if chosen is None:
        raise RewindError(
            key="checkpoint.every_steps",
            happened=f"{found.happened}\n    There is no checkpoint to go back to yet",
            expected="a checkpoint before the first bad number",
            fix="a smaller checkpoint.every_steps; a smaller optimizer.lr if it happens at the very start",
        )
    from_step, samples, jumps = state.step, state.samples, state.jumps
    load(chosen, components, state, world, moves=moves)
    in_vain = [jump for jump in jumps[-_MOST_IN_VAIN:] if jump.to_step == state.step]
    if len(in_vain) == _MOST_IN_VAIN:
        raise RewindError(
            key="trainer.on_nonfinite",
            happened=f"{found.happened}\n    Going back to step {state.step} and on with other data has not helped {_MOST_IN_VAIN} times",
            expected="a checkpoint from which training goes on",
            fix="ddp-train resume RUN/checkpoints/STEP of an earlier step, with a smaller optimizer.lr",
        )
    jump = Jump(from_step=from_step, to_step=state.step, samples=(state.samples, samples))
    state.samples, state.jumps = samples, [*jumps, jump]
    state.owes_evaluation = False  # made up for when this attempt began
    if world.is_main:
        set_aside_after(chosen.parent, chosen)
        predictions.forget_after(run_folder.predictions, state.step)
    tell(
        {"time": time.time(), "kind": "rewound", "step": state.step, "from_step": from_step, "jumped": list(jump.samples)},
        f"rewound from step {from_step} to {chosen.name}; the data goes on after sample {samples:,}",
    )


def resume(job: Job, components: Components, state: TrainState, world: World, *, moves: Callable[[], None]) -> bool:
    """Continue from the given or the newest good checkpoint; tell whether there is one. Collective."""
    chosen = _choose_checkpoint(job, world, moves)
    if world.is_main:
        remove_debris(job.run_folder.checkpoints)
        for name in set_aside_after(chosen.parent if chosen else job.run_folder.checkpoints, chosen):
            print(f"a checkpoint of a later step is now {name}", flush=True)
    if chosen is None:
        if world.is_main and job.run_folder.metrics.exists():
            print("resumed  from the start: there is no good checkpoint", flush=True)
        return False
    rebuild_buckets(components, world)
    if not load(chosen, components, state, world, moves=moves):
        seed_all(job.config.tree["seed"] + state.step, rank=world.rank)  # another number of ranks: new streams, not those of step 0 again
    return True


def _choose_checkpoint(job: Job, world: World, moves: Callable[[], None]) -> Path | None:
    """Return the given or the newest good one, the same on all ranks. Collective."""
    if job.checkpoint is not None:
        given = Path(job.checkpoint)
        found: Path = world.from_main(catalog.find(given, partial(verify, moves=moves), key="resume") if world.is_main else None)
        return found
    newest, refused = newest_good(job.run_folder.checkpoints, world, moves=moves)
    if world.is_main:
        print(*(f"{line}\n" for line in refused), sep="", end="", flush=True)
    return newest
