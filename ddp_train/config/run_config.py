"""One run's configuration, typed: `PartialConfig` for the rules, `RunConfig` for every rank; and the configs of its data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ddp_train.config import auto
from ddp_train.config.batch_sizes import LR_SCALES, BatchSizes, accumulation_of, derive_batch_sizes, sizes_on
from ddp_train.config.hydra_internals import yaml_text
from ddp_train.config.schema import EVALUATION_SETS, NAMED, ROOT_KEYS, SECTIONS, TARGETS, RootConfig, Sections, as_dataclass
from ddp_train.config.targets.locate import constants_of_ours, look_up_or_none
from ddp_train.config.targets.target import DIRECTIVES, declares, framework_keys
from ddp_train.traits import OptimizerConstants

ANSWERED = "auto"  # where config.yaml lists the keys that were `auto`


class InvalidSectionError(Exception):
    """A rule has read an invalid section: the rule ends, and the section's own problems are shown."""


class _InvalidSection:
    """Stands for an invalid section."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidSectionError


@dataclass(frozen=True, kw_only=True)
class PartialConfig(Sections):
    """A configuration while it is checked: our own sections, typed, and the configs of components; {} stands for a missing one."""

    tree: Mapping[str, Any]  # all of it, as it was composed

    @classmethod
    def of(cls, sections: Mapping[str, dict[str, Any] | None], tree: Mapping[str, Any]) -> PartialConfig:
        """Return the config of a tree. `sections` has our own sections that are in it; None stands for an invalid one."""
        sections_and_components: dict[str, Any] = dict.fromkeys(SECTIONS, _InvalidSection()) | {name: {} for name in TARGETS}
        sections_and_components |= {name: as_dataclass(SECTIONS[name], values) for name, values in sections.items() if values is not None}
        sections_and_components |= {name: tree[name] for name in TARGETS if isinstance(tree.get(name), dict)}
        return cls(**sections_and_components, tree=tree)

    @cached_property
    def batch(self) -> BatchSizes:
        """The sizes of the batch. ConfigError: they contradict each other."""
        return derive_batch_sizes(self.trainer, self.loader, self.cluster)

    @property
    def num_micro_batches(self) -> int:
        """The most micro-batches that a rank has of a step; 1 while their size is not known."""
        sizes = [self.batch.global_batch_size, *(change.value for change in self.trainer.batch_size_schedule or ())]
        return max(accumulation_of(size, self.loader, self.batch.world_size) for size in sizes)

    @property
    def is_evaluated(self) -> bool:
        return bool(evaluation_sets(self.tree))


@dataclass(frozen=True, kw_only=True)
class RunConfig(RootConfig, Sections):
    """One run's configuration: everything resolved, our own sections typed, the configs of components as plain containers."""

    metrics: dict[str, dict[str, Any] | None]  # metric writers, by name; what is measured is in `evaluation.metrics`
    callbacks: dict[str, dict[str, Any] | None]

    tree: dict[str, Any]  # the whole configuration, as written to config.yaml, hashed and compared
    batch: BatchSizes
    left_out: list[str] = field(default_factory=list)  # lines on arguments of an option that the user's own `_target_` does not take

    @classmethod
    def of(cls, tree: dict[str, Any], batch: BatchSizes, left_out: list[str] | None = None) -> RunConfig:
        """Return the typed form of a checked tree."""
        root = vars(as_dataclass(RootConfig, {key: tree[key] for key in ROOT_KEYS}))
        components = {name: tree[name] for name in (*TARGETS, *NAMED)}
        sections: dict[str, Any] = {name: as_dataclass(schema, tree[name]) for name, schema in SECTIONS.items()}
        return cls(**root, **sections, **components, tree=tree, batch=batch, left_out=left_out or [])

    @property
    def uses_compiler(self) -> bool:
        """Whether a rank imports torch's compiler: DDP does, and so do torch's own optimizers."""
        spares = constants_of_ours(self.optimizer, OptimizerConstants).spares_compiler
        return self.batch.world_size > 1 or self.compile.mode is not None or not spares

    def rate_factor(self) -> float:
        """Return the factor of all the optimizer's rates (`optimizer.lr_scale`)."""
        options = framework_keys(self.optimizer, "optimizer")
        scale = options.get("lr_scale")
        return 1.0 if scale is None else LR_SCALES[scale](self.batch.global_batch_size / options["base_batch_size"])

    def batch_notes(self) -> list[str]:
        """Return notes on the sizes of the batch: what changes them, and which rates follow."""
        batch = self.batch
        notes: list[str] = []
        if batch.is_derived and batch.world_size > 1:
            keeps = f"trainer.global_batch_size={batch.global_batch_size} keeps both"
            notes.append(f"another number of ranks changes the batch and the result; {keeps}")
        factor = self.rate_factor()
        if factor != 1.0:
            rate = self.optimizer.get("lr")
            ratio = f"{batch.global_batch_size} / optimizer.base_batch_size {self.optimizer['base_batch_size']}"
            example = f": {rate * factor:g} in place of {rate:g}" if isinstance(rate, (int, float)) else ""
            notes.append(f"all rates of the optimizer x {factor:g}{example} (optimizer.lr_scale={self.optimizer['lr_scale']}, {ratio})")
        return notes

    def runs_before(self) -> list[Path]:
        """Return the folders of the runs that must have completed before this one begins (`after`)."""
        return [Path(folder).absolute() for folder in self.after or ()]

    def on(self, world_size: int) -> RunConfig:
        """Return the same run on another number of ranks: the global batch is kept, the accumulation follows."""
        if world_size == self.batch.world_size:
            return self
        batch = sizes_on(world_size, self.batch.global_batch_size, self.loader.micro_batch_size)
        accumulation = None if batch.is_open else batch.grad_accum_steps
        return RunConfig.of({**self.tree, "trainer": {**self.tree["trainer"], "grad_accum_steps": accumulation}}, batch, self.left_out)

    def with_micro_batch(self, size: int) -> RunConfig:
        """Return the same run with the measured micro-batch in `loader` and `batch`; its tree and hash stay as composed, with `auto`."""
        batch = sizes_on(self.batch.world_size, self.batch.global_batch_size, size)
        return replace(self, loader=replace(self.loader, micro_batch_size=size), batch=batch)

    def yaml(self, answers: Mapping[str, Any] | None = None) -> str:
        """Return config.yaml.

        `answers`: of its `auto`s, by their keys, as plain values; they replace the `auto`s, whose keys the file lists under `auto`.
        """
        if not answers:
            return self._yaml
        return yaml_text({**auto.with_answers(self.tree, "", answers), ANSWERED: sorted(answers)})

    @cached_property
    def _yaml(self) -> str:
        return yaml_text(self.tree)

    def hash(self) -> str:
        """Return the sha256 of the composed config: the same on all ranks and in all attempts, whatever the answers of its `auto`s."""
        return hashlib.sha256(self.yaml().encode()).hexdigest()


def evaluation_sets(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the changes for each evaluation set, by key: `data.eval` first, then each of `evaluation.sets`; {}: nothing is evaluated."""
    data, evaluation = tree.get("data"), tree.get("evaluation")
    changes_by_key = {"data.eval": data.get("eval") if isinstance(data, Mapping) else None}
    named = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    changes_by_key |= {f"{EVALUATION_SETS}.{name}": changes for name, changes in (named or {}).items()}
    return {key: changes for key, changes in changes_by_key.items() if isinstance(changes, Mapping)}


def data_config(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the config of the training data (`data`) or of an evaluation set. A named set with its own `_target_` inherits nothing."""
    training_data = {name: value for name, value in tree["data"].items() if name != "eval"}
    if key == "data":
        return training_data
    changes = evaluation_sets(tree)[key]
    return {**changes} if key != "data.eval" and "_target_" in changes else _merged(training_data, changes)


def set_name(key: str) -> str:
    """Return the name of the evaluation set at a key; "" for `data.eval`."""
    return "" if key == "data.eval" else key.removeprefix(f"{EVALUATION_SETS}.")


def _merged(component_config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a component config with changes, groups of keys merged. With another `_target_` it keeps what that class has by name."""
    merged = dict(component_config)
    if changes.get("_target_", component_config.get("_target_")) != component_config.get("_target_"):
        target = look_up_or_none(changes["_target_"])
        merged = {name: value for name, value in component_config.items() if name not in DIRECTIVES and target and declares(target, name)}
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged
