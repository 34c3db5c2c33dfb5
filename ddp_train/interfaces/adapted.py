"""An object whose class does not inherit from one of our base classes, used as one of that base."""

from abc import ABCMeta
from inspect import get_annotations
from types import MemberDescriptorType
from typing import Any

from ddp_train.errors import ConfigError


class Adapted:
    """Mixed into a subclass of a base of ours: stands for an object of another class, which has what is abstract in the base.

    Of each other public member of the base it gives what the object has at that moment, and our default while the object has none.
    """

    def __init_subclass__(cls, base: ABCMeta) -> None:
        for name in dir(base):
            if not name.startswith("_") and getattr(cls, name) is getattr(base, name):  # what `cls` defines itself stays
                setattr(cls, name, _own_or_default(cls, name))

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        if isinstance(ours := getattr(type(self), name, None), property):
            return ours.__get__(self)  # raises again the AttributeError in the object's code, in whose place Python has called this method
        return getattr(self.own, name)  # what the base does not have: a callback may know the data's class

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.own,)


def own_member(own: Any, name: str, default: Any = None) -> Any:
    """Return a member of an object, and the default where it has none: `getattr`, but for an AttributeError that a property raises."""
    try:
        return getattr(own, name)
    except AttributeError as error:  # of the object, or of one within that a wrapper has asked for the member
        in_class = (getattr(type(each), name, None) for each in (own, error.obj))
        if error.name != name or any(each is not None and not isinstance(each, MemberDescriptorType) for each in in_class):
            raise  # of what a class has; a name in `__slots__` is of what it may have later
        return default


def lacking(own: Any, interface: type) -> list[str]:
    """Return what an object lacks of an interface: of what is abstract in a base class, of all that a protocol has."""
    names = dict.fromkeys(name for each in reversed(interface.__mro__) for name in (*get_annotations(each), *vars(each)))
    needed = getattr(interface, "__abstractmethods__", None) or {name for name in names if not name.startswith("_")}
    return [name for name in names if name in needed and own_member(own, name) is None]


def require_members(own: Any, interface: type, *, key: str) -> None:
    """Refuse an object that lacks something of an interface (ConfigError with the component's key)."""
    if missing := lacking(own, interface):
        happened = f"gave a {type(own).__name__}, which lacks {', '.join(missing)}"
        raise ConfigError(key=f"{key}._target_", happened=happened, expected=f"what ddp_train.interfaces.{interface.__name__} has")


def _own_or_default(cls: type, name: str) -> property:
    return property(lambda adapted: own_member(adapted.own, name, getattr(super(cls, adapted), name)))
