"""An object whose class does not inherit from one of our base classes, used as one of that base."""

from abc import ABCMeta
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
        return getattr(self.own, name)  # what the base does not have: a callback may know the data's class

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.own,)


def lacking(own: Any, base: ABCMeta) -> list[str]:
    """Return what is abstract in a base and missing in an object."""
    return [name for name in vars(base) if name in base.__abstractmethods__ and not hasattr(own, name)]


def _own_or_default(cls: type, name: str) -> property:
    return property(lambda adapted: getattr(adapted.own, name, getattr(super(cls, adapted), name)))
