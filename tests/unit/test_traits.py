"""What a class tells of itself."""

from __future__ import annotations

from ddp_train.traits import needs_whole_matrices


class Shampoo:
    """Known by its name."""


class Mine(Shampoo):
    """Derived from it."""


class Elementwise(Shampoo):
    """Says the contrary."""

    needs_whole_matrices = False


class Own:
    """Nobody knows its name."""

    needs_whole_matrices = True


def test_a_class_needs_whole_matrices_by_its_name_its_bases_or_its_own_word() -> None:
    assert [needs_whole_matrices(kind) for kind in (Shampoo, Mine, Elementwise, Own, object)] == [True, True, False, True, False]
