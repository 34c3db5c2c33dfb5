"""What a class tells of itself that the check before the start and the ranks ask alike. Imports no torch."""

import inspect
import re
from typing import Literal

from ddp_train.errors import ConfigError

_WHOLE_MATRICES = ("Muon", "LBFGS", "Adafactor", "SOAP", "Shampoo", "LAMB", "LARS")
"""Optimizers of torch and of others, by the names of their classes, which several packages have."""
_LOSS_UNITS: dict[str, Literal["sample", "token", "next_token"]] = {  # what the loss is the mean over, by what the class is called
    r"CausalLM|LMHead|DoubleHeads": "next_token",
    r"MaskedLM|TokenClassification|ConditionalGeneration|Seq2SeqLM|MaskedImage": "token",
    r"Sequence|ImageClassification|AudioClassification|VideoClassification|MultipleChoice|NextSentence": "sample",
}


def needs_whole_matrices(kind: type) -> bool:
    """Tell whether an optimizer's update of a number depends on others of its parameter: then no rank can step some rows alone.

    A class that is derived from such a one needs them, too. A class says it, or the contrary, by an attribute `needs_whole_matrices`.
    """
    said = getattr(kind, "needs_whole_matrices", None)
    return bool(said) if said is not None else any(each.__name__ in _WHOLE_MATRICES for each in kind.__mro__)


def require_rows(strategy: object, optimizer: object) -> None:
    """Raise a ConfigError for an optimizer (or one within `Several`) that needs whole matrices, where each rank steps rows of them."""
    if getattr(strategy, "shards_optimizer", False):
        for part in getattr(optimizer, "optimizers", (optimizer,)):
            if needs_whole_matrices(type(part)):
                raise whole_matrices_error("optimizer", type(part).__name__)


def whole_matrices_error(key: str, name: str) -> ConfigError:
    """Return the error for an optimizer that needs whole matrices, where each rank steps some rows of a parameter."""
    happened = f"is {name}, which needs whole matrices, and with this strategy a rank steps some rows of them"
    expected = "an optimizer that steps each number by itself (AdamW, SGD)"
    return ConfigError(key=key, happened=happened, expected=expected, fix="optimizer=adamw, or strategy=ddp")


def has_modes(optimizer: object) -> bool:
    """Tell whether an optimizer evaluates other weights than it trains, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def refuse_modes(optimizer: object, why: str) -> None:
    """Raise a ConfigError for an optimizer that evaluates other weights than it trains."""
    if has_modes(optimizer):
        happened = f"is {type(optimizer).__name__}, with other weights to evaluate than to train, {why}"
        expected = "an optimizer that trains the weights that are evaluated"
        raise ConfigError(key="optimizer", happened=happened, expected=expected, fix="optimizer=adamw, or strategy=ddp")


def follows_a_metric(target: object) -> bool:
    """Tell whether a scheduler is torch's ReduceLROnPlateau, or a class made of it."""
    return inspect.isclass(target) and any(base.__name__ == "ReduceLROnPlateau" for base in target.__mro__)


def loss_unit(kind: type) -> Literal["sample", "token", "next_token"]:
    """Return what the loss that a model returns is the mean over, by the name of its class or of one that it is derived from.

    Raises ConfigError: no name tells.
    """
    names = [each.__name__ for each in kind.__mro__]
    units = [unit for name in names for pattern, unit in _LOSS_UNITS.items() if re.search(pattern, name)]
    if not units:
        happened = f"is auto, and the name {names[0]} does not tell what the model's loss is the mean over"
        expected = "sample, token (labels that are not -100) or next_token (those but for the first of each sample)"
        raise ConfigError(key="objective.unit", happened=happened, expected=expected, fix="objective.unit=sample")
    return units[0]
