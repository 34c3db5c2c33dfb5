"""What the class of a component declares, for the check before the start and for the ranks; and members of objects. Imports no torch.

The class of a component, of any package, may declare the constants below, as literals (docs/components.md has them as a table). The check
reads those of our classes from their source (`config/targets/locate.py`) and need not import torch.

An object whose class does not inherit from one of our base classes is used as one of that base (`Adapted`), if it has what the base needs.
"""

import functools
import re
from abc import ABCMeta
from collections.abc import Mapping
from inspect import get_annotations
from types import MemberDescriptorType
from typing import Any, ClassVar, Literal, TypeVar

from ddp_train.errors import ConfigError

_WHOLE_MATRICES = ("Muon", "LBFGS", "Adafactor", "SOAP", "Shampoo", "LAMB", "LARS")  # names of classes, which several packages have
_LOSS_UNITS: dict[str, Literal["sample", "token", "next_token"]] = {  # what the loss is the mean over, by what the class is called
    r"CausalLM|LMHead|DoubleHeads": "next_token",
    r"MaskedLM|TokenClassification|ConditionalGeneration|Seq2SeqLM|MaskedImage": "token",
    r"Sequence|ImageClassification|AudioClassification|VideoClassification|MultipleChoice|NextSentence": "sample",
}


class Constants:
    argument_ranges: ClassVar[Mapping[str, Mapping[str, float]]] = {}  # argument -> its bounds: `min`, `above` and `below`


class StrategyConstants(Constants):
    shards_parameters: bool = False  # each forward is a collective, backward gives final gradients; `prepare` takes rank 0's values
    shards_optimizer: bool = False  # the optimizer steps some rows of each parameter: it must not need whole matrices
    has_buckets: bool = False  # the first backwards decide in which order the ranks' values are added: a resumed run takes two first
    weights_are_per_rank: bool = False  # each rank steps its own, and saves them; else all ranks have the same after a step
    state_is_per_rank: bool = False  # `state_dict` is each rank's own, and saved for each; else it is the same on all, and saved once
    refuses_loss_scale: str = ""  # why it cannot train with fp16's loss scale on several ranks; "": it can
    refuses_accumulation: tuple[str, ...] = ()  # arguments that must be false where a step has several micro-batches
    divides_ranks: tuple[str, ...] = ()  # arguments whose number must divide that of the ranks
    offloads: tuple[str, ...] = ()  # arguments that move what is trained to the host's memory: refused on a CPU and with steps in backward
    gradients_stay_with: ClassVar[Mapping[str, bool]] = {}  # argument -> the value with which gradients stay in place; {}: they never do


class OptimizerConstants(Constants):
    needs_whole_matrices: bool | None = None  # a number's update depends on others of its parameter; None: the names of its bases tell
    steps_parameters_alone: bool | None = None  # each by itself, so that it can step in backward; None: torch's own do, but LBFGS
    saved_as: str = ""  # full name of the class in whose format its state is saved, each reads the other's checkpoints; "": its own
    spares_compiler: bool = False  # it imports nothing of torch's compiler: the launcher need not prepare it (read of our classes alone)


class ObjectiveConstants(Constants):
    compares_samples: bool = False  # the loss compares the samples of a micro-batch: `loader.micro_batch_size=auto` is refused
    loss_is_models: bool = False  # the model returns its loss: a batch must be a dict with `labels`
    needs_labels: bool = False  # data without labels is refused (read of our classes alone)
    labels_are_classes: bool = False  # labels [B] are checked against logits [B, K] before the first step, without `ignore_index`
    binds_without_values: bool = False  # `bind_model` reads no values: a rank need not make them


class DataConstants(Constants):
    gives_pairs: bool = False  # a batch is (inputs, targets), and no dict
    labels_argument: str = ""  # the argument that is false for batches without labels; "": there is none (read of our classes alone)
    downloads: bool = False  # it downloads what is missing: `ddp-train doctor` does not report it


class CallbackConstants(Constants):
    needs_evaluation: bool = False  # it follows a metric of the evaluation: refused where nothing is evaluated


Goal = Literal["min", "max"]  # of a metric: which way is better
Declared = TypeVar("Declared", bound=Constants)


def constants_of(component: object, declared: type[Declared]) -> Declared:
    """Return the constants of a component or its class: its own, and the defaults in `declared` of those that it lacks."""
    constants = declared()
    vars(constants).update({name: getattr(component, name) for name in dir(declared) if name[0] != "_" and hasattr(component, name)})
    return constants


def needs_whole_matrices(kind: type) -> bool:
    """Tell whether an optimizer's update of a number depends on others of its parameter: then no rank can step some rows alone."""
    said = constants_of(kind, OptimizerConstants).needs_whole_matrices
    return said if said is not None else any(each.__name__ in _WHOLE_MATRICES for each in kind.__mro__)


def steps_parameters_alone(kind: type) -> bool:
    """Tell whether an optimizer steps each parameter by itself, so that it can step in backward."""
    said = constants_of(kind, OptimizerConstants).steps_parameters_alone
    return said if said is not None else kind.__module__.startswith("torch.optim.") and kind.__name__ != "LBFGS"


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


def loss_unit(kind: type) -> Literal["sample", "token", "next_token"]:
    """Return the unit that a model's own loss is the mean over, by the name of its class or of one of its bases.

    Raises ConfigError: no name tells.
    """
    names = [each.__name__ for each in kind.__mro__]
    units = [unit for name in names for pattern, unit in _LOSS_UNITS.items() if re.search(pattern, name)]
    if not units:
        happened = f"is auto, and the name {names[0]} does not tell what the model's loss is the mean over"
        expected = "sample, token (labels that are not -100) or next_token (those but for the first of each sample)"
        raise ConfigError(key="objective.unit", happened=happened, expected=expected, fix="objective.unit=sample")
    return units[0]


class Adapted:
    """Mixed into a subclass of a base of ours: stands for an object of another class, which has what is abstract in the base.

    Of each other public member of the base it gives what the object has at that moment, and our default while the object has none.
    """

    def __init_subclass__(cls, base: ABCMeta) -> None:
        for name in dir(base):
            if not name.startswith("_") and getattr(cls, name) is getattr(base, name):  # what `cls` defines itself stays
                setattr(cls, name, _wrapped_or_default(cls, name))

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if isinstance(ours := getattr(type(self), name, None), property):
            return ours.__get__(self)  # raises again the AttributeError in the object's code, in whose place Python has called this method
        return getattr(self.wrapped, name)  # what the base does not have: a callback may know the data's class

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.wrapped,)


def unadapted(component: Any) -> Any:
    """Return the object that an adapter stands for; any other is itself."""
    return component.wrapped if isinstance(component, Adapted) else component


def name_of(component: Any) -> str:
    """Return the name of a component's own class, for messages."""
    return type(unadapted(component)).__name__


def function_of(partial: Any) -> Any:
    """Return the function of a `functools.partial`, which has none of its attributes; any other is itself."""
    while isinstance(partial, functools.partial):
        partial = partial.func
    return partial


def member_of(target: Any, name: str, default: Any = None) -> Any:
    """Return a member of an object, and the default where it has none: `getattr`, but for an AttributeError that a property raises."""
    try:
        return getattr(target, name)
    except AttributeError as error:  # of the object, or of one within that a wrapper has asked for the member
        in_class = (getattr(type(each), name, None) for each in (target, error.obj))
        if error.name != name or any(each is not None and not isinstance(each, MemberDescriptorType) for each in in_class):
            raise  # of what a class has; a name in `__slots__` is of what it may have later
        return default


def lacking(target: Any, interface: type) -> list[str]:
    """Return the members of an interface that an object lacks: the abstract ones of a base class, all of a protocol."""
    names = dict.fromkeys(name for each in reversed(interface.__mro__) for name in (*get_annotations(each), *vars(each)))
    needed = getattr(interface, "__abstractmethods__", None) or {name for name in names if not name.startswith("_")}
    return [name for name in names if name in needed and member_of(target, name) is None]


def require_members(target: Any, interface: type, *, key: str) -> None:
    """Refuse an object that lacks something of an interface (ConfigError with the component's key)."""
    if missing := lacking(target, interface):
        happened = f"gave a {type(target).__name__}, which lacks {', '.join(missing)}"
        raise ConfigError(key=f"{key}._target_", happened=happened, expected=f"what ddp_train.interfaces.{interface.__name__} has")


def _wrapped_or_default(cls: type, name: str) -> property:
    return property(lambda adapted: member_of(adapted.wrapped, name, getattr(super(cls, adapted), name)))
