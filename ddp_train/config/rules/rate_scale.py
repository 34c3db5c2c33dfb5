"""Rates that follow the global batch: `optimizer.lr_scale`, from the batch for which `optimizer.lr` was found.

Linear for SGD: a step over k times the samples at k times the rate goes as far as k small ones (Goyal et al. 2017, arXiv:1706.02677).
Square root for Adam and its kin, which divide by the gradient's own size: it keeps the noise of their steps (Malladi et al. 2022,
arXiv:2205.10287).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.errors import ConfigError

_FACTORS = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def factor(ours: Mapping[str, Any], global_batch_size: int) -> float:
    """Return what all rates of the optimizer are multiplied with; 1 without `lr_scale`.

    Args:
        ours: our keys of the optimizer's node (`own_keys`).
    """
    scale = ours.get("lr_scale")
    return 1.0 if scale is None else float(_FACTORS[scale](global_batch_size / ours["base_batch_size"]))


def check(ours: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield what is wrong with the two keys, and what would take no notice of them."""
    scale, base = ours.get("lr_scale"), ours.get("base_batch_size")
    if scale not in (None, *_FACTORS):
        yield ConfigError(key="optimizer.lr_scale", happened=f"is {scale!r}", expected="linear (SGD), sqrt (Adam and its kin) or null")
    if base is not None and (isinstance(base, bool) or not isinstance(base, int) or base < 1):
        yield ConfigError(key="optimizer.base_batch_size", happened=f"is {base!r}", expected="a number of samples, at least 1")
    if (scale is None) != (base is None):
        missing, given = ("lr_scale", "base_batch_size") if scale is None else ("base_batch_size", "lr_scale")
        yield ConfigError(
            key=f"optimizer.{missing}",
            happened=f"is not given, and optimizer.{given} is {ours[given]}",
            expected="both: how rates follow the global batch, and the one for which they were found",
            fix="optimizer.lr_scale=linear optimizer.base_batch_size=256, or optimizer.lr_scale=sqrt for Adam",
        )
    if scale is None:
        return
    if (tree.get("trainer") or {}).get("batch_size_schedule"):
        yield ConfigError(
            key="optimizer.lr_scale",
            happened=f"is {scale}, and trainer.batch_size_schedule has several sizes: the rate follows one",
            expected="one of the two",
            fix="optimizer.lr_scale=null optimizer.base_batch_size=null",
        )
    if absolute := sorted({"max_lr", "base_lr"} & (tree.get("scheduler") or {}).keys()):
        yield ConfigError(
            key=f"scheduler.{absolute[0]}",
            happened=f"sets the rate itself, so that optimizer.lr_scale={scale} would change nothing",
            expected="a scheduler of factors, as ours and most of torch's are",
            fix="scheduler=warmup_cosine, or optimizer.lr_scale=null optimizer.base_batch_size=null",
        )
