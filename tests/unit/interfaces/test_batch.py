"""What the loop takes of a batch, whatever it is made of."""

from __future__ import annotations

import pytest
import torch

from ddp_train.interfaces import batch_size


def test_batch_size_is_the_first_dimension_of_the_first_tensor() -> None:
    assert batch_size(torch.zeros(3, 2)) == 3
    assert batch_size(([], (torch.tensor(1.0), torch.zeros(4)))) == 4
    assert batch_size(({"temperature": torch.tensor(1.0), "image": [torch.zeros(5, 1)]}, torch.zeros(7))) == 5
    with pytest.raises(TypeError, match="found none in a dict"):
        batch_size({"name": "cat"})
