"""What is told of batches of any form."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from ddp_train.interfaces.batch import batch_size, counted_as


def test_batch_size_is_the_first_dimension_of_the_first_tensor() -> None:
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size(([], (torch.tensor(1.0), torch.zeros(4)))) == 4
    assert batch_size(({"temperature": torch.tensor(1.0), "image": [torch.zeros(5, 1)]}, torch.zeros(7))) == 5
    with pytest.raises(TypeError, match="found none in a dict"):
        batch_size({"name": "cat"})


def test_a_number_that_the_loader_gives_holds_for_its_batch_alone() -> None:
    points = torch.zeros(11, 3)
    with suppress(ZeroDivisionError), counted_as(4):
        assert batch_size(points) == batch_size([points]) == 4
        with counted_as(None):
            assert batch_size(points) == 11
        assert batch_size(points) == 4
        raise ZeroDivisionError
    assert batch_size(points) == 11
