"""The one probe: when is the model called? Nothing of ours is in it."""

from __future__ import annotations

import mmap
import os
import struct
import time

import torch
from torch import nn


class Probe:
    """Notes when a model is called, into a file of this process that is in memory: a process that is killed has written it, too.

    The file is `PROBE/PID`: how many steps it has, the time of the first forward, torch's threads, then for each step the time and the CPU
    time of this process when the forward after it began. A step is taken when weights have other values: what tries a batch before the
    first step is none.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.memory = mmap.mmap(-1, 4096)
        self.count, self.room = 0, 0
        if folder := os.environ.get("PROBE"):
            self.room = int(os.environ["PROBE_STEPS"])
            with open(os.path.join(folder, f"{os.getpid()}"), "w+b") as file:
                file.truncate(24 + 16 * self.room)
                self.memory = mmap.mmap(file.fileno(), 0)
        self.values = weight.detach().flatten()[:8].numpy()  # several: an update may be too small for one of them
        self.before = self.values.tobytes()
        struct.pack_into("<3d", self.memory, 0, 0, time.time(), torch.get_num_threads())

    def __call__(self) -> None:
        values = self.values.tobytes()
        if values == self.before or self.count == self.room:
            return
        self.before = values
        struct.pack_into("<2d", self.memory, 24 + 16 * self.count, time.time(), time.process_time())
        self.count += 1
        struct.pack_into("<d", self.memory, 0, self.count)


class Probed(nn.Module):
    """A model that calls the probe at the beginning of each forward; the probe is made in the first one, in the process that trains."""

    probe: Probe | None = None

    def note(self, weight: nn.Parameter) -> None:
        if self.probe is None:
            object.__setattr__(self, "probe", Probe(weight))
        assert self.probe is not None
        self.probe()
