"""An object whose class does not inherit from one of our base classes, used as one of that base."""

from abc import ABCMeta
from types import MemberDescriptorType
from typing import Any


class Adapted:
    """Mixed into a subclass of a base of ours: stands for an object of another class, which has what is abstract in the base.

    Of each other public member of the base it gives what the object has at that moment, and our default while the object has none.
    """

    _base: ABCMeta

    def __init_subclass__(cls, base: ABCMeta) -> None:
        cls._base = base
        for name in dir(base):
            if not name.startswith("_") and getattr(cls, name) is getattr(base, name):  # what `cls` defines itself stays
                setattr(cls, name, _own_or_default(cls, name))

    def __init__(self, own: Any) -> None:
        if missing := lacking(own, self._base):
            raise TypeError(f"{type(own).__name__} lacks {', '.join(missing)} (ddp_train.interfaces.{self._base.__name__})")
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


def lacking(own: Any, base: ABCMeta) -> list[str]:
    """Return what is abstract in a base and missing in an object."""
    return [name for name in vars(base) if name in base.__abstractmethods__ and own_member(own, name) is None]


def _own_or_default(cls: type, name: str) -> property:
    return property(lambda adapted: own_member(adapted.own, name, getattr(super(cls, adapted), name)))
