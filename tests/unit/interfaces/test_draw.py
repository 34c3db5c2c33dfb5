"""What is drawn by the sample depends on its place in the run alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddp_train.interfaces import draw

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda size: draw.rand(size, 5, 3),
    "randn": lambda size: draw.randn(size, 7),
    "randint": lambda size: draw.randint(1000, size, 4),
    "rand_like": lambda size: draw.rand_like(torch.zeros(size, 3)),
    "randn_like": lambda size: draw.randn_like(torch.zeros(size, 2, 2, dtype=torch.float64)),
    "bernoulli": lambda size: draw.bernoulli(torch.full((size, 64), 0.3)),
    "one for each sample": draw.rand,
}


def source(place: int | None, size: int, seed: int = 7) -> draw.Source:
    return draw.Source(seed, place, (torch.zeros(size, 2), torch.zeros(size)), CPU)


@pytest.mark.parametrize("take", DRAWS.values(), ids=DRAWS)
def test_a_sample_gets_the_same_in_any_batch(take: Callable[[int], Tensor]) -> None:
    with source(100, 12):
        first, second = take(12), take(12)
    with source(104, 3):
        again = take(3), take(3)
    assert torch.equal(torch.stack(again), torch.stack([first[4:7], second[4:7]]))
    assert not torch.equal(first, second)
    with source(100, 12, seed=8):
        assert not torch.equal(take(12), first)


def test_the_numbers_are_uniform_normal_and_independent() -> None:
    with source(0, 64):
        uniform, normal, again = draw.rand(64, 4097), draw.randn(64, 4097), draw.randn(64, 4097)
        share = draw.bernoulli(torch.full((64, 4096), 0.3)).mean()
        whole = draw.randint(6, 64, 4096)
    assert (uniform.mean().item(), uniform.var().item()) == pytest.approx((1 / 2, 1 / 12), rel=0.01)
    assert uniform.min() >= 0 and uniform.max() < 1
    moments = [normal.mean().item(), normal.var().item(), (normal**3).mean().item(), (normal**4).mean().item()]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert share.item() == pytest.approx(0.3, abs=0.01)
    assert torch.bincount(whole.flatten()).float().div(whole.numel()).tolist() == pytest.approx([1 / 6] * 6, rel=0.05)
    for other in (again, normal.roll(1, 0), normal.roll(1, 1), normal.roll(2048, 1)):
        assert (normal * other).mean().item() == pytest.approx(0, abs=0.01)


def test_torch_draws_outside_of_a_run_and_for_samples_without_places() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4, 2), torch.randn(4, 2)
    torch.manual_seed(3)
    with source(None, 4):
        first = draw.rand(4, 2)
    assert torch.equal(torch.stack([first, draw.randn(4, 2)]), torch.stack(expected))


def test_the_pieces_of_a_sample_draw_each_its_own_and_none_that_is_of_another_sample() -> None:
    """Windows of tokens may be cut: on two ranks, each sample in two rows."""
    alone, first, second = (draw.Source(7, place, torch.zeros(size), CPU, pieces=2) for place, size in ((10, 8), (10, 4), (12, 4)))
    with alone:
        rows = draw.randn(8, 3)
    with first:
        of_first = draw.randn(4, 3)
    with second:
        of_second = draw.randn(4, 3)
    assert torch.equal(torch.cat([of_first, of_second]), rows)
    assert len(rows.unique()) == rows.numel()


def test_another_number_of_samples_is_refused() -> None:
    with source(0, 4), pytest.raises(ValueError, match="begins with the number of samples, 4, and not with 8"):
        draw.randn(8, 2)


def test_a_draw_that_is_computed_again_is_refused() -> None:
    rows = torch.ones(4, 2, requires_grad=True)
    with source(0, 4):
        noisy = checkpoint(lambda given: given * draw.rand_like(given), rows, use_reentrant=False)
        with pytest.raises(RuntimeError, match="computed again"):
            noisy.sum().backward()
