"""The facts that answer an argument which is `auto` (config/auto.py), by section; those for metric writers with their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_train.system.phase import Phases


@dataclass(frozen=True, kw_only=True)
class WriterFacts:
    """What rank 0 knows of its run, for the metric writers: an argument that is `auto` gets the fact of its name."""

    run_dir: str
    config: Mapping[str, Any]
    hyper_parameters: Mapping[str, Any]  # typed or swept
    run_name: str = ""  # in a sweep: the values that differ between its jobs
    step: int  # after which this attempt begins
    total_steps: int
    phases: Phases  # the phase of rank 0
    epoch: float | None = None  # where this attempt begins; None: there are no epochs, or nothing is trained
    steps_per_epoch: int | None = None
    notes: Callable[[], Sequence[str]] = tuple  # returns lines about the run, for a terminal


_OF_DATA = ("image_shape", "num_classes", "vocab_size", "context_length")
FACTS = {
    "model": _OF_DATA,
    "objective": (*_OF_DATA, "ignore_index", "bytes_per_token"),
    "evaluation": (*_OF_DATA, "ignore_index"),
    "scheduler": ("total_steps", "steps_per_epoch"),
    "metrics": tuple(WriterFacts.__annotations__),
}
"""A data set may have more."""
