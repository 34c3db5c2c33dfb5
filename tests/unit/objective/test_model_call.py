"""Batches of any form reach the model, and what counts of its output is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError
from ddp_train.objective.model_call import call, unwrap

A, B, Y = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.tensor([0, 1])


class Adding(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a if b is None else a + 10 * b


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((A, Y), A), ([A, Y], A), ((A, B, Y), A + 10 * B), ({"b": B, "a": A, "labels": Y}, A + 10 * B), ({"a": A, "target": Y}, A)],
)
def test_inputs_go_to_the_model_by_place_or_by_name(batch: Any, expected: Tensor) -> None:
    outputs, targets = call(Adding(), batch)
    assert torch.equal(outputs, expected)
    assert targets is Y


@pytest.mark.parametrize("batch", [{"a": A}, {"a": A, "label": Y, "labels": Y}, A, (A,)])
def test_a_batch_that_does_not_tell_its_targets_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError):
        call(Adding(), batch)


@pytest.mark.parametrize(
    "given",
    [(A, B), {"out": A, "aux": B}, {"logits": A, "aux_loss": B}, SimpleNamespace(logits=A, aux_logits=B, hidden_states=(B, B))],
)
def test_what_counts_and_what_is_beside_it(given: Any) -> None:
    outputs, beside = unwrap(given)
    assert outputs is A
    assert len(beside) == 1 and beside[0] is B


def test_an_output_that_is_not_known_is_refused_with_its_shapes() -> None:
    assert unwrap(A) == (A, [])
    with pytest.raises(TypeError, match="last_hidden_state"):
        unwrap({"last_hidden_state": A})
