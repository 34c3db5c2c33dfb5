"""What is said of a stack."""

from __future__ import annotations

import traceback

import pytest
import torch

from ddp_train.system import stack_text


def test_a_stack_is_described_by_what_goes_on_and_the_innermost_line_that_is_no_librarys() -> None:
    class Model(torch.nn.Module):
        def forward(self, stacks: list[traceback.StackSummary]) -> None:
            stacks.append(traceback.extract_stack())

    stacks: list[traceback.StackSummary] = []
    Model()(stacks)
    assert stack_text.describe(stacks[0]).startswith("in forward, test_stack_text.py:")
    leaf = torch.ones((), requires_grad=True)
    leaf.register_hook(lambda gradient: stacks.append(traceback.extract_stack()))
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // 0
    assert stack_text.describe(traceback.extract_tb(caught.tb)).startswith("test_stack_text.py:")
    leaf.backward()  # type: ignore[no-untyped-call]
    assert stack_text.describe(stacks[1]).startswith("in backward, test_stack_text.py:")
