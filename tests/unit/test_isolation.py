"""What a job may change is put back, and nothing else is changed by that."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack

from ddp_train.isolation import Baseline


def test_the_default_device_is_put_back_and_torch_is_not_slower_for_it() -> None:
    baseline = Baseline()
    torch.set_default_device("meta")
    baseline.restore()
    assert torch.get_default_device().type == "cpu"
    assert not _get_current_function_mode_stack()  # a default device, even CPU, is a mode that every call of torch passes through
