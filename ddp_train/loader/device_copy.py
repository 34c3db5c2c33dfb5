"""Batches on the device: copied there while it is still busy with the one before."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ddp_train.interfaces.batch import Batch, given_batch_size, map_tensors, normalise_and_mix, tensors_of
from ddp_train.loader.reader import MicroBatch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a batch, without waiting for the copy; images that travel as bytes are normalised and mixed there."""
    if device.type == "cpu" and not isinstance(batch, Tensor):
        return normalise_and_mix(batch)
    return normalise_and_mix(map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch))


@contextmanager
def batch_on(device: torch.device, micro_batch: MicroBatch) -> Iterator[Batch]:
    """Yield the batch of a micro-batch on the device; within, its `batch_size` is what the loader says."""
    with given_batch_size(micro_batch.num_samples):
        yield to_device(micro_batch.batch, device) if micro_batch.on_device is None else micro_batch.on_device


def copied_ahead(micro_batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Copy each micro-batch to a GPU on a stream for copies, one ahead of the one that is yielded. On the CPU it changes nothing."""
    return _copied_ahead(micro_batches, device) if device.type == "cuda" else micro_batches


def _copied_ahead(micro_batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Copy on a stream for copies, and let each copy wait for the work that the computing stream has been given by then.

    A copy may get the memory of a batch that no code holds any more and that the device has yet to read. All work that reads it is on the
    computing stream by then, so the copy comes after it. `record_stream` would keep the memory of all batches by which the host is ahead.
    """
    copy_stream = _copying_stream(device)
    waiting: tuple[MicroBatch, torch.cuda.Event] | None = None
    for micro_batch in micro_batches:
        if all(tensor.device.type != device.type for tensor in tensors_of(micro_batch.batch)):  # else its memory is the computing stream's
            copy_stream.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(copy_stream):
                micro_batch = micro_batch._replace(on_device=to_device(micro_batch.batch, device))
        copied = copy_stream.record_event()
        if waiting is not None:
            yield _after_copy(*waiting)
        waiting = micro_batch, copied
    if waiting is not None:
        yield _after_copy(*waiting)


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of this process for copies to a device: torch's allocator keeps freed memory for each stream by itself."""
    return torch.cuda.Stream(device)


def _after_copy(micro_batch: MicroBatch, copied: torch.cuda.Event) -> MicroBatch:
    torch.cuda.current_stream().wait_event(copied)
    return micro_batch
