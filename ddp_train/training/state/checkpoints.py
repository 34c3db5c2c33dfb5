"""A run's checkpoints: resume from one when it begins, save when one is due, rewind to the newest. `ddp_train/checkpoint` has the files."""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.catalog import CatalogEntry, ranking_for, remove_debris, set_aside
from ddp_train.checkpoint.manifest import Ranking, read_manifest
from ddp_train.checkpoint.read import damage_of, newest_good
from ddp_train.checkpoint.save import Saver
from ddp_train.checkpoint.schedule import CheckpointSchedule, Retention, remove_old
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import CheckpointConfig
from ddp_train.distributed.world import World
from ddp_train.errors import EnvironmentRefuses, RunError, readable_size
from ddp_train.run_folder.paths import RunFolder, step_folders
from ddp_train.system.files import write_atomic
from ddp_train.system.phase import Phase, Phases
from ddp_train.training.check.memory import estimate_share
from ddp_train.training.parts.components import Components, EvaluationComponents
from ddp_train.training.parts.evaluated_weights import weights_to_evaluate
from ddp_train.training.record import predictions
from ddp_train.training.record.loss_monitor import Rewind
from ddp_train.training.record.records import Records, run_event
from ddp_train.training.state.saved_state import checkpoint_content, start_from
from ddp_train.training.train_state import Jump, TrainState, WindowSums

_MAX_REWINDS = 3  # to the same checkpoint, one after the other


class RewindError(RunError):
    """The run cannot go back any more."""


class Checkpoints:
    """Saves one run, and rewinds it."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_folder: RunFolder,
        components: Components,
        state: TrainState,
        world: World,
        keep: Retention,
        records: Records,
        phases: Phases,
        ask_to_save: Callable[[], bool],
    ) -> None:
        """Listen to the records, and for a GPU let a thread get memory for the first save; `keep` is of `retention`. Collective."""
        self._run_folder, self._components, self._state, self._world = run_folder, components, state, world
        self._keep, self._records, self._phases = keep, records, phases
        self._saver = Saver(
            folder=run_folder.checkpoints,
            world=world,
            config_hash=config.hash(),
            run=world.from_main(run_folder.run_id),
            asynchronous=config.checkpoint.asynchronous,
            remove_old=partial(remove_old, keep=keep),
            on_progress=phases.report_progress,
        )
        if world.device.type == "cuda":
            self._saver.make_room(estimate_share(components, world))
        self._schedule = CheckpointSchedule(
            every_evaluation=config.checkpoint.every_evaluation,
            every_steps=config.checkpoint.every_steps,
            every_minutes=config.checkpoint.every_minutes,
            keep=keep,
            saved=_saved_checkpoints(run_folder, world),
            ask_to_save=ask_to_save,
        )
        records.listen(self._schedule.note)

    def decide(self, step: int, *, is_agreed: bool) -> bool:
        """Decide on every rank whether to save after a step and its evaluation, as `CheckpointSchedule.decide` does."""
        return self._schedule.decide(step, is_agreed=is_agreed)

    def save(self, window: WindowSums) -> None:
        """Save the run as it is now; `window` has the sums since the last record. Collective."""
        self._saver.finish()  # before the collective: the store reports a lost rank at once
        with weights_to_evaluate(self._components) as kept:
            content = checkpoint_content(self._components, self._state, window, self._world, kept)
            self._saver.save(content, metrics=self._schedule.metrics_of(self._state.step), ranked_by=self._keep.ranking)

    def finish(self) -> str | None:
        """Wait until the newest checkpoint is complete; return its error, or None. Collective."""
        return self._saver.finish()

    def rewind(self, cause: Rewind) -> None:
        """Load the newest good checkpoint into the components and the state, but for the position in the data. Collective.

        The data goes on where it is, past the batches with the bad losses.

        Raises RewindError: there is no checkpoint, or going back to it has not helped three times.

        Source: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1 (PaLM: spikes come from a batch and a state of the weights together).
        """
        state = self._state
        self._phases.enter(Phase.START, state.step)  # reading a checkpoint takes its time
        self._saver.finish()
        self._records.log_event(cause.event, cause.happened)
        chosen = newest_good(self._run_folder.checkpoints, self._world, on_progress=self._phases.report_progress)
        if chosen is None:
            happened = f"{cause.happened}\n    There is no checkpoint to go back to yet"
            fix = "a smaller checkpoint.every_steps; a smaller optimizer.lr if it happens at the very start"
            raise RewindError(key="checkpoint.every_steps", happened=happened, expected="a checkpoint before the first bad number", fix=fix)
        from_step, position, jumps = state.step, state.position, state.jumps
        start_from(chosen, self._components, state, self._world, on_progress=self._phases.report_progress)
        if sum(jump.to_step == state.step for jump in jumps[-_MAX_REWINDS:]) == _MAX_REWINDS:
            raise RewindError(
                key="health.on_nonfinite",
                happened=f"{cause.happened}\n"
                f"    Going back to step {state.step} and continuing with other data has failed {_MAX_REWINDS} times",
                expected="a checkpoint from which training can continue",
                fix="ddp-train resume RUN/checkpoints/STEP of an earlier step, with a smaller optimizer.lr",
            )
        jump = Jump(from_step=from_step, to_step=state.step, undone=(state.position, position))
        state.position, state.jumps = position, [*jumps, jump]
        state.evaluation_pending = False  # it was done when this attempt began
        if self._world.is_main:
            set_aside(chosen.parent, from_step=state.step, chosen=chosen)
            predictions.forget_after(self._run_folder.predictions, state.step)
        self._records.log_event(
            run_event("rewound", state.step, from_step=from_step, jumped=list(jump.undone)),
            f"rewound from step {from_step} to {chosen.name}; the data continues after sample {position:,}",
        )
        self._schedule.go_back(_saved_checkpoints(self._run_folder, self._world))
        self._records.reopen()


def retention(settings: CheckpointConfig, components: EvaluationComponents) -> Retention:
    """Return which checkpoints stay; refuses a metric that the run does not measure."""
    by = ranking_of(components, settings.metric)
    return Retention(last=settings.keep_last, best=settings.keep_best, every_steps=settings.keep_every_steps, ranking=by)


def ranking_of(components: EvaluationComponents, metric: str | None = None) -> Ranking:
    """Return the metric to compare checkpoints by, and its goal. None: the objective's first."""
    return ranking_for(components.goals, metric=metric, is_evaluated=bool(components.eval_loaders))


def probe_room(folder: Path, checkpoint_bytes: int) -> None:
    """Write, synchronise, rename and remove a file in the folder of the checkpoints, and check that there is room for two.

    Each takes about `checkpoint_bytes`. Raises EnvironmentRefuses: nothing can be written there, or there is no room.
    """
    try:
        probe = folder / f".probe_{os.getpid()}"
        write_atomic(probe, " " * 4096)
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        happened = f"{folder} cannot be written: {error.strerror or error}"
        expected = "a folder in which files can be written, synchronised, renamed and removed"
        fix = "repair it, or use hydra.run.dir=FOLDER on another disk"
        raise EnvironmentRefuses(key="hydra.run.dir", happened=happened, expected=expected, fix=fix) from None
    needed = max(1, 2 - len(step_folders(folder))) * checkpoint_bytes
    if free < needed:
        estimate = f"one takes {readable_size(checkpoint_bytes)} (weights and optimizer, estimated)"
        happened = f"{folder} has {readable_size(free)} free, and needs {readable_size(needed)}: {estimate}"
        expected = "room for two checkpoints, so that the old one stays until the new one is complete"
        fix = "free disk space there, or use hydra.run.dir=FOLDER on a larger disk"
        raise EnvironmentRefuses(key="checkpoint", happened=happened, expected=expected, fix=fix)


def resumed_checkpoint(run_folder: RunFolder, path: str | None, world: World, *, on_progress: Callable[[], None]) -> Path | None:
    """Return the checkpoint to resume from, verified: at `path`, or the newest good one of the run; None: there is none. Collective."""
    if path is None:
        return newest_good(run_folder.checkpoints, world, on_progress=on_progress)
    return world.from_main(lambda: catalog.find_checkpoint(Path(path), partial(damage_of, on_progress=on_progress), key="resume"))


def _saved_checkpoints(run_folder: RunFolder, world: World) -> Sequence[CatalogEntry]:
    """Return the checkpoints that rank 0 sees: a shared file system may show its files to others later. Collective."""
    return world.from_main(lambda: catalog.saved_checkpoints(run_folder.checkpoints))


def discard_later(run_folder: RunFolder, chosen: Path | None, world: World) -> None:
    """Set aside the checkpoints after the chosen one, and remove incomplete ones (rank 0)."""
    remove_debris(run_folder.checkpoints)
    folder, from_step = (chosen.parent, read_manifest(chosen).step) if chosen else (run_folder.checkpoints, 0)
    moved = set_aside(folder, from_step=from_step, chosen=chosen)
    world.print(*(f"a checkpoint of a later step, or of another run, was renamed to {name}" for name in moved))
    if chosen is None and run_folder.metrics.exists():
        print("resumed  from the start: there is no good checkpoint", flush=True)
