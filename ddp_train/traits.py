"""What a class tells of itself that the check before the start and the ranks ask alike. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal

from ddp_train.errors import ConfigError

_WHOLE_MATRICES = ("Muon", "LBFGS", "Adafactor", "SOAP", "Shampoo", "LAMB", "LARS")
"""Optimizers of torch and of others, by the names of their classes, which several packages have."""


def needs_whole_matrices(kind: type) -> bool:
    """Tell whether an optimizer's update of a number depends on others of its parameter: then no rank can step some rows alone.

    A class that is derived from such a one needs them, too. A class says it, or the contrary, by an attribute `needs_whole_matrices`.
    """
    said = getattr(kind, "needs_whole_matrices", None)
    return bool(said) if said is not None else any(each.__name__ in _WHOLE_MATRICES for each in kind.__mro__)


_LOSS_UNITS: dict[str, Literal["sample", "token", "next_token"]] = {  # what the loss is the mean over, by what the class is called
    r"CausalLM|LMHead|DoubleHeads": "next_token",
    r"MaskedLM|TokenClassification|ConditionalGeneration|Seq2SeqLM|MaskedImage": "token",
    r"Sequence|ImageClassification|AudioClassification|VideoClassification|MultipleChoice|NextSentence": "sample",
}


def loss_unit(kind: type) -> Literal["sample", "token", "next_token"]:
    """Return what the loss that a model returns is the mean over, by the name of its class or of one that it is derived from.

    Raises:
        ConfigError: no name tells.
    """
    names = [each.__name__ for each in kind.__mro__]
    units = [unit for name in names for pattern, unit in _LOSS_UNITS.items() if re.search(pattern, name)]
    if not units:
        raise ConfigError(
            key="objective.unit",
            happened=f"is auto, and the name {names[0]} does not tell what the model's loss is the mean over",
            expected="sample, token (labels that are not -100) or next_token (those but for the first of each sample)",
            fix="objective.unit=sample",
        )
    return units[0]
