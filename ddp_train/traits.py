"""What a class tells of itself that the check before the start and the ranks ask alike. Imports no torch."""

from __future__ import annotations

_WHOLE_MATRICES = ("Muon", "LBFGS", "Adafactor", "SOAP", "Shampoo", "LAMB", "LARS")
"""Optimizers of torch and of others, by the names of their classes, which several packages have."""


def needs_whole_matrices(kind: type) -> bool:
    """Tell whether an optimizer's update of a number depends on others of its parameter: then no rank can step some rows alone.

    A class that is derived from such a one needs them, too. A class says it, or the contrary, by an attribute `needs_whole_matrices`.
    """
    said = getattr(kind, "needs_whole_matrices", None)
    return bool(said) if said is not None else any(each.__name__ in _WHOLE_MATRICES for each in kind.__mro__)
