"""Records, the lines of metrics.jsonl; and `ddp_train.log`, which puts a number from anywhere in a model into one. Imports no torch.

What a record means:

    loss, loss_<turn>   the mean over the samples (tokens) of all steps since the last record, but for steps that were skipped;
                        null, or not there, where no step counts
    what is logged      the mean over all calls on all ranks since then whose value is finite; null where none was. Of a skipped step, too
    grad_norm, lr       of the newest step
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

AXES = ("split", "step", "epoch", "samples", "time")  # of a record: where it belongs; all else in it are values
Sink = Callable[[str, Any], None]  # takes a name, and a number or a tensor of one element
_sink: Sink | None = None


def log(name: str, value: Any) -> None:
    """Put a number, or a tensor of one element without waiting for the device, into the next training record.

    The record has the mean over all calls on all ranks since the last one, but for values that are not finite; NaN where none is.
    Not every rank has to call it. Outside of a training step (in evaluation, in a script, in a test of the model) it does nothing.

    Raises ValueError: it is not one number, or the record has another value of this name.
    """
    if _sink is not None:
        _sink(name, value)


def values_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record by their full names, as `eval/accuracy`."""
    return {f"{record['split']}/{name}": value for name, value in record.items() if name not in AXES}


@contextmanager
def taken_by(sink: Sink | None) -> Iterator[None]:
    """Give what is logged inside the block to `sink`; None: to nobody."""
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before
