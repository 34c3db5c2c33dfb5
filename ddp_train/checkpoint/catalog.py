"""Which checkpoints there are, and which is the best. Imports no torch.

Each manifest has the metrics of its step, and the metric by which checkpoints are compared: the folder alone tells which ones to keep and
which one is `best`, also after a restart and to another run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ddp_train.checkpoint.manifest import CheckpointError, Manifest, Ranking, opened, read_text
from ddp_train.errors import ConfigError, UserError
from ddp_train.run_folder.paths import COMPLETE, MANIFEST, RunFolder, step_folders
from ddp_train.system.files import remove
from ddp_train.traits import Goal

BEST, LAST = "best", "last"  # names for a checkpoint: RUN/checkpoints/best. No such folder exists
_DEBRIS = (".partial_*", ".removed_*")  # left by a process that was killed while it saved, or while it removed


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """One checkpoint, as its manifest describes it."""

    path: Path
    step: int
    metrics: Mapping[str, Any]  # those of its step
    ranking: Ranking | None  # the metric by which its run compared checkpoints then
    run: str | None = None  # the id of the run that saved it; None: it does not say
    is_foreign: bool = False  # it lies in the folder of another run


def ranking_for(goals: Mapping[str, Goal], *, metric: str | None, is_evaluated: bool) -> Ranking:
    """Return the metric by which a run's checkpoints are compared: the user's choice `metric`, or the first of the objective's `goals`.

    A run that does not evaluate has the training loss alone. Raises ConfigError: there is no such metric, or it has no direction.
    """
    valid: Mapping[str, Goal] = {f"eval/{name}": goal for name, goal in goals.items()} if is_evaluated and goals else {"train/loss": "min"}
    metric = metric or next(iter(valid))
    if metric not in valid:
        happened = f"is {metric!r}, which this run does not measure or which has no direction"
        expected = f"one of {', '.join(valid)}" + ("" if is_evaluated else " (data.eval is null: nothing is evaluated)")
        raise ConfigError(key="checkpoint.metric", happened=happened, expected=expected)
    return Ranking(metric=metric, goal=valid[metric])


def saved_checkpoints(folder: Path) -> list[CatalogEntry]:
    """Return a run's checkpoints below a folder, the oldest first, without those of other runs; their files are not verified."""
    return [entry for entry in all_entries(folder) if not entry.is_foreign]


def all_entries(folder: Path) -> list[CatalogEntry]:
    """Return the checkpoints below a run's folder, of other runs too, the oldest first; those without a readable manifest are left out."""
    run_id = RunFolder(folder.parent).run_id()
    complete = [(step, path) for step, path in step_folders(folder) if (path / COMPLETE).exists()]
    return [entry for step, path in complete if (entry := _read(step, path, run_id)) is not None]


def candidates(name: Path) -> list[Path]:
    """Return the checkpoints for a name like RUN/checkpoints/best, in the order of preference: the first undamaged one is used.

    The newest checkpoint's manifest says by which metric they are compared.
    """
    entries = saved_checkpoints(name.parent)
    if name.name == LAST:
        return [entry.path for entry in reversed(entries)]
    ranking = next((entry.ranking for entry in reversed(entries) if entry.ranking is not None), None)
    return [entry.path for entry in best_first(entries, ranking)] if ranking is not None else []


def find_checkpoint(path: Path, damage_of: Callable[[Path], str | None], *, key: str) -> Path:
    """Return the undamaged checkpoint at `path`, or the one that RUN/checkpoints/best or last stands for; print which are not used.

    `damage_of`: the function of `read`; `key`: the config key that has the path. Raises UserError: there is none.
    """
    if not is_name(path):
        if damage := damage_of(path):
            raise UserError(key=key, happened=f"{path}: {damage}", expected="a checkpoint that is complete and undamaged")
        return path
    foreign = [entry.path for entry in all_entries(path.parent) if entry.is_foreign]  # printed, and not used
    for checkpoint in [*foreign, *require_candidates(path, key=key)]:
        damage = damage_of(checkpoint)
        if damage is None:
            return checkpoint
        print(f"checkpoint {checkpoint.name} is not used: {damage}", flush=True)
    raise UserError(key=key, happened=f"{path}: all checkpoints are damaged", expected="an undamaged checkpoint")


def require_candidates(name: Path, *, key: str) -> list[Path]:
    """Return the checkpoints that a name may stand for. Raises ConfigError: there is none or, for `best`, none with the metric."""
    if checkpoints := candidates(name):
        return checkpoints
    happened = f"there is no complete checkpoint in {name.parent}"
    expected = "a run that has saved one"
    fix = f"ddp-train resume {name.parent.parent}, which starts again"
    if num_saved := len(saved_checkpoints(name.parent)):
        happened = f"none of the {num_saved} checkpoints was saved right after an evaluation"
        expected = "a checkpoint with its metrics, as checkpoint.keep_best=1 saves them"
        fix = f"ddp-train resume {name.parent.parent}, which takes the newest"
    raise ConfigError(key=key, happened=f"{name}: {happened}", expected=expected, fix=fix)


def set_aside(folder: Path, *, from_step: int, chosen: Path | None) -> list[str]:
    """Rename a run's checkpoints from a step on except the chosen one, and all of other runs; return the new names."""
    foreign = [entry.path for entry in all_entries(folder) if entry.is_foreign]
    new_names = []
    for left_behind in [path for step, path in step_folders(folder) if path in foreign or (step >= from_step and path != chosen)]:
        unused_names = (left_behind.with_name(f"aside_{number}_{left_behind.name}") for number in count())
        new_names.append(left_behind.rename(next(path for path in unused_names if not path.exists())).name)
    return new_names


def remove_debris(folder: Path) -> None:
    """Remove half-written and half-removed checkpoints of a killed run. No process may be saving in the folder."""
    for path in [path for pattern in _DEBRIS for path in folder.glob(pattern)]:
        remove(path)


def is_name(path: Path) -> bool:
    """Tell whether a path is a name for a checkpoint: RUN/checkpoints/best or RUN/checkpoints/last."""
    return path.name in (BEST, LAST) and path.parent.is_dir() and not path.exists()


def is_checkpoint(path: Path) -> bool:
    return is_name(path) or (path / MANIFEST).exists()


def best_first(saved: Sequence[CatalogEntry], ranking: Ranking) -> list[CatalogEntry]:
    """Return the checkpoints that have the metric, the best first, of equal ones the earlier."""
    ranked = [(-value, entry.step, entry) for entry in saved if (value := ranking.value(entry.metrics)) is not None]
    return [entry for _, _, entry in sorted(ranked, key=lambda item: item[:2])]


def _read(step: int, path: Path, run_id: str | None) -> CatalogEntry | None:
    """Read a manifest, which may be forged, in the folder of the run with this id."""
    try:
        with opened(path, MANIFEST) as descriptor:
            manifest = Manifest.from_bytes(read_text(descriptor))
    except (CheckpointError, OSError):
        return None
    is_foreign = run_id is not None and manifest.run != run_id
    return CatalogEntry(path=path, step=step, metrics=manifest.metrics, ranking=manifest.ranked_by, run=manifest.run, is_foreign=is_foreign)
