"""The arguments of commands on a run, and its job: from its frozen config, and nothing else."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_train.checkpoint.catalog import BEST, LAST, candidates, is_name, require_candidates
from ddp_train.cli.location import require_pipeline
from ddp_train.config.check import check_frozen
from ddp_train.config.command import saved_overrides
from ddp_train.config.command.command_line import options_of
from ddp_train.config.saved import answered_config, replaced_configs, saved_config
from ddp_train.config.spelling import nearest
from ddp_train.config.tree import dotted_items, texts
from ddp_train.errors import ConfigError
from ddp_train.launch.job import Evaluation, Job, Training
from ddp_train.run_folder.paths import RunFolder, is_sweep, step_of
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.trust import require_trust

TRUST = "--trust"
"""Code that another user has written may run as this one."""

PATH = re.compile(r"(^|[._])(root|path|file|folder|dir|directory|init_from|sample_weights)$")
"""Keys of paths."""


def parse_words(
    typed: Sequence[str], usage: str, known: Mapping[str, str], *, most: int | None = 1, default: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Return the options of a command (`--steps=5` or `--steps 5`, `to=PATH`; a flag with ""), and its other words: the run folder first.

    Args:
        known: its options, each with what stands behind it: N or CODE, a whole number; another word, any text; "", nothing.
            One with `...` may be repeated, and has a line for each time.
        most: the largest number of words; None: any number.
        default: the word where there is none.

    Raises ConfigError: an option is unknown or lacks its value, or there are too few words or too many.
    """
    options: dict[str, str] = {}
    words: list[str] = []
    remaining = iter(typed)
    for word in remaining:
        name, equals, value = word.partition("=")
        if not word.startswith("-") and not (equals and name in known):
            words.append(word)
            continue
        takes_value = known.get(name, "") != ""
        if name not in known or (equals and not takes_value):
            close = nearest(name, known)
            meant = f"{close}{equals}{value}" if known.get(close) else close
            fix = meant if close else word.lstrip("-") if equals else ""
            raise ConfigError(happened=f"{word} is not an option", expected=", ".join(known), fix=fix)
        if takes_value and not equals and (value := next(remaining, "")) == "":
            raise ConfigError(happened=f"{name} has no value", expected=f"{name}=VALUE")
        if known[name] in ("N", "CODE") and not value.isdigit():
            raise ConfigError(happened=f"{name}: {value!r} is not a number", expected=f"{name}=N, a whole number")
        options[name] = f"{options[name]}\n{value}" if known[name].endswith("...") and name in options else value
    words = words or ([default] if default else [])
    if not words or len(words) > (most or len(words)):
        argument = re.findall("[A-Z]{2,}", usage)[0].replace("RUN", "run folder")
        raise ConfigError(happened=f"no {argument} was given, or more than one", expected=usage.partition("\n")[0])
    return options, words


def run_of(path: Path, *, key: str = "resume") -> Path:
    """Return the folder of a run or of one of its checkpoints, also by the names `best` and `last`. Raises ConfigError: it is neither."""
    if is_name(path):
        require_candidates(path, key=key)
    for folder in (path, path.parent.parent):
        if (path.exists() or is_name(path)) and RunFolder(folder).config.exists():
            return folder.absolute()
    if is_sweep(path):
        raise ConfigError(key=key, happened=f"{path} is the folder of a sweep", expected="one of its jobs", fix=f"ddp-train runs {path}")
    happened = f"{path} is neither a run folder nor a checkpoint"
    raise ConfigError(key=key, happened=happened, expected="a folder that holds config.yaml, or sweep.json")


def ask_trust(command: str, words: list[str], path: Path) -> None:
    """Refuse a folder or a spec of another user without `--trust`. ConfigError: with everything that it would run."""
    accept = shlex.join(["ddp-train", command, *(word for word in words if word != TRUST), TRUST])
    require_trust(path, key="SPEC" if command == "node" else "RUN", is_trusted=TRUST in words, accept=accept)


def frozen_job(folder: Path, overrides: list[str], *, in_sweep: bool = False, checkpoint: str | None = None) -> Job:
    """Return the job of a run folder: its own frozen config, with single values changed."""
    saved = saved_config(folder)
    saved["cluster"] = {**saved["cluster"], "node_rank": None}  # it was that of the machine where the run began
    changed = saved_overrides.with_overrides(saved, overrides, replaced=replaced_configs(folder))
    tree: Any = OmegaConf.to_container(changed)
    first_overrides, options = original_words(folder)
    config = check_frozen(tree)
    run_folder = RunFolder(folder)
    if not run_folder.environment.exists():  # a run that has begun waits for no other run
        require_pipeline(config)
    return Job(
        config=config,
        run_folder=run_folder,
        command=list(sys.argv),
        overrides=[*first_overrides, *overrides],
        options=options,
        in_sweep=in_sweep,
        work=Evaluation.read(run_folder) or Training(checkpoint=checkpoint),
    )


def refuse_without_effect(job: Job, overrides: list[str]) -> None:
    """Refuse to change a run that has taken all its steps.

    A script may repeat one command until the run is done. So `cluster.*` may differ, and values that config.yaml has already are accepted.
    """
    if (steps := _all_taken(job)) is None:
        return
    trainer = job.config.trainer
    values = dict(dotted_items(job.config.tree))
    saved_values = [dict(dotted_items(tree)) for tree in (saved_config(job.run_folder.root), answered_config(job.run_folder.root))]
    keys = {text: text.lstrip("~").partition("=")[0] for text in overrides if not text.startswith("cluster.")}
    without_effect = [text for text, key in keys.items() if values.get(key) not in [saved.get(key) for saved in saved_values]]
    if not without_effect:
        return
    by_steps = trainer.max_steps is not None and trainer.max_steps <= steps
    happened = f"all {steps} steps of {job.run_folder.as_typed()} are done: {' '.join(without_effect)} would change nothing"
    expected = "more steps to train with it, or a new run; `ddp-train evaluate RUN evaluation.save_predictions=true` saves predictions"
    fix = f"trainer.max_steps={2 * steps}" if by_steps else f"trainer.max_epochs={2 * (trainer.max_epochs or 1)}"
    raise ConfigError(key=without_effect[0].lstrip("~").partition("=")[0], happened=happened, expected=expected, fix=fix)


def require_more(job: Job) -> None:
    """Refuse to submit a run that has taken all its steps; if steps are left, remove its result.json."""
    if (steps := _all_taken(job)) is not None:
        happened = f"all {steps} steps of {job.run_folder.as_typed()} are done"
        raise ConfigError(key="resume", happened=happened, expected="more steps to train", fix=f"trainer.max_steps={2 * steps}")
    if job.run_folder.is_completed():
        job.run_folder.result.unlink()


def original_words(folder: Path) -> tuple[list[str], list[str]]:
    """Return the overrides and the options that a run began with; none where the files are damaged, which must not stop a run."""
    hydra = RunFolder(folder).hydra
    try:
        return texts(OmegaConf.load(hydra / "overrides.yaml")), options_of(OmegaConf.load(hydra / "hydra.yaml").hydra)
    except Exception:  # OSError, or any error of half a file
        return [], []


def _all_taken(job: Job) -> int | None:
    """Return the number of steps of a run that is done; None where some are left after the checkpoint that it would continue from."""
    result = job.run_folder.read_result()
    if result is None or result.status != Status.COMPLETED or result.step is None:
        return None
    checkpoint = Path(job.checkpoint) if job.checkpoint else job.run_folder.checkpoints / LAST
    first = next(iter(candidates(checkpoint)), None) if checkpoint.name in (BEST, LAST) else checkpoint
    step = step_of(first) if first is not None else 0
    max_steps, max_epochs = job.config.trainer.max_steps, job.config.trainer.max_epochs
    by_epochs = max_epochs is not None and result.epoch is not None and max_epochs <= result.epoch * step / result.step
    return result.step if by_epochs or (max_steps is not None and max_steps <= step) else None
