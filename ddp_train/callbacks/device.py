"""How much memory a run takes on its devices and machines, in the record."""

from __future__ import annotations

import resource

import torch

from ddp_train.interfaces import Run

_GIB = 2.0**30
_KIB = 2.0**10


class Device:
    """Logs the mean over the ranks of `device/memory_gib`, the most that tensors took since the last record, `device/reserved_gib`, what
    torch holds of the device, and `device/host_gib`, the most that the process took so far. Asks the host alone, at log steps.
    """

    def step(self, run: Run) -> None:
        if not run.is_log_step:
            return
        if run.device.type == "cuda":
            run.log("device/memory_gib", torch.cuda.max_memory_allocated(run.device) / _GIB)
            run.log("device/reserved_gib", torch.cuda.memory_reserved(run.device) / _GIB)
            torch.cuda.reset_peak_memory_stats(run.device)
        run.log("device/host_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB)
