"""Automatic mixed precision: in which type the forward pass computes, and whether the loss is scaled."""

from contextlib import AbstractContextManager, nullcontext

import torch

from ddp_train.errors import ConfigError

_INIT_SCALE = 2.0**16  # as torch has it
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def best_dtype(device: torch.device) -> str | None:
    """Return the type that `dtype=auto` stands for on a device: "bfloat16" on a GPU that computes it in hardware, else None: float32."""
    return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else None


class Amp:
    """Mixed precision for one run.

    Args:
        dtype: "bfloat16", "float16", or None for float32 throughout. `best_dtype` says what `auto` in the config means.

    Raises ConfigError: another dtype.

    Source: Micikevicius et al. 2017, arXiv:1710.03740 (float32 weights, loss scaling).
    """

    def __init__(self, dtype: str | None = None) -> None:
        if dtype is not None and dtype not in _DTYPES:
            happened = f"{dtype!r} is no type for mixed precision"
            raise ConfigError(key="amp.dtype", happened=happened, expected="auto, bfloat16, float16 or null", fix="amp=bf16")
        self.dtype = None if dtype is None else _DTYPES[dtype]
        self._off: AbstractContextManager[None] = nullcontext()  # enters and leaves in 0.1 us, any number of times

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context for forward and loss. Backward and evaluation metrics need none."""
        return self._off if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device, world_size: int = 1) -> torch.amp.GradScaler:
        """Return the loss scaler; for all but float16 a disabled one, whose methods pass through.

        The loop multiplies the loss by the world size besides. What overflows, and so is skipped, depends on the product of both: it is
        the same for any number of ranks.
        """
        return torch.amp.GradScaler(device.type, init_scale=_INIT_SCALE / world_size, enabled=self.dtype == torch.float16)
