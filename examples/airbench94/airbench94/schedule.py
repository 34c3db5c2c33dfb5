"""The learning rate of every step, as a factor of the optimizer's own: up in a straight line, and down in another one."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def triangle(
    optimizer: Optimizer, total_steps: int, *, start_ratio: float = 0.2, peak: float = 0.23, final_ratio: float = 0.07
) -> LambdaLR:
    """Rise in a straight line from `start_ratio` of the peak to it, and fall in another one towards `final_ratio`.

    The peak is at the step `peak` x `total_steps`, rounded down; `final_ratio` would be that of the step after the last one.

    Source: Smith 2015, arXiv:1506.01186 (triangular rates); with these numbers Jordan 2024, arXiv:2404.00498.
    """
    if not 0 <= peak < 1:
        raise ValueError(f"peak is {peak}, and a share of the run is needed: at least 0, and below 1")
    peak_step = int(peak * total_steps)

    def factor(step: int) -> float:
        if step < peak_step:
            return start_ratio + (1 - start_ratio) * step / peak_step
        return 1 - (1 - final_ratio) * min(1.0, (step - peak_step) / (total_steps - peak_step))

    return LambdaLR(optimizer, factor)
