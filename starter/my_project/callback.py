"""A callback of our own: a class with any of the methods on_start, on_step, on_evaluation, on_save and on_end."""

from __future__ import annotations

import torch

from ddp_train.interfaces import Run


class WeightNorm:
    """Logs the L2 norm of all weights, beside the loss."""

    def on_step(self, run: Run) -> None:
        """Log it in the steps whose record is written; tensors are read later, so that nothing waits here."""
        if run.is_log_step:
            run.log("weight_norm", torch.nn.utils.get_total_norm([parameter.detach() for parameter in run.model.parameters()]))
