"""Tensors of any type and shape."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from ddp_train.checkpoint import codec

TENSORS = st.builds(
    lambda name, shape, seed: (
        torch.randint(
            0, 256, (math.prod(shape) * codec.DTYPES[name].itemsize,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        .clamp(max=1 if name == "bool" else 255)
        .view(codec.DTYPES[name])
        .view(shape)
    ),
    st.sampled_from(sorted(codec.DTYPES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 2**32),
)
