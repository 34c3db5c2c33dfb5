"""Import what a `_target_` names, or have what stands in for it, and say what it is and takes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ddp_train.config.targets.from_source import read_class, stand_in


class NeedsImport(BaseException):
    """Something is to be imported where nothing may be. No Exception: those are told as what is wrong with a component."""


_imports = True


@contextmanager
def importing_nothing() -> Iterator[None]:
    """Let `locate` raise `NeedsImport` while the block runs."""
    global _imports
    _imports = False
    try:
        yield
    finally:
        _imports = True


def locate(path: str) -> Any:
    """Import the object that a dotted path names.

    Raises:
        ImportError: a module does not exist or does not have the name; the message says which, with the nearest name there is.
        NeedsImport: see `importing_nothing`.
    """
    if not _imports:
        raise NeedsImport(path)
    parts = path.split(".")
    if parts[0] == "__main__":  # of a script, or of a notebook's cells
        fix = f"put it into a file (in a notebook: %%writefile my_file.py) and name my_file.{parts[-1]}"
        raise ImportError(f"the processes that train are not the program that has it; {fix}")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise  # the module exists; something that it imports does not
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                close = difflib.get_close_matches(name, dir(found), n=1)
                hint = f"; did you mean {'.'.join(parts[: parts.index(name)])}.{close[0]}?" if close else ""
                raise ImportError(f"{module_name} has no {name!r}{hint}")
            found = getattr(found, name)
        return found
    hint = f"; a path begins with its module, as my_file.{path}" if len(parts) == 1 else ""
    raise ImportError(f"there is no module {parts[0]!r} here (looked in the current folder and in the installed packages){hint}")


def look_up(path: str) -> Any:
    """Return the object that a dotted path names, or what stands in for it where only its arguments are asked for (`from_source`).

    Raises:
        ImportError: as `locate` does.
    """
    return stand_in(path) or locate(path)


def look_up_or_none(path: Any) -> Any:
    """Return what a `_target_` names; None where `check_target` says what is wrong with it."""
    try:
        return look_up(path) if isinstance(path, str) else None
    except Exception:  # a user's module may raise anything while it is imported
        return None


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the types that a callable's arguments are annotated with; {} where they cannot be read."""
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # names that exist only for type checkers, and worse: then types are not checked
        return {}


def class_of(path: str) -> type:
    """Return the class that a dotted path names, or that its function says it returns: what it is derived from, its plain attributes.

    `object` where that is not known.
    """
    if (read := read_class(path)) is not None:
        return read
    try:
        target = look_up(path)
        found = target if inspect.isclass(target) else typing.get_type_hints(target).get("return")
    except Exception:  # what is wrong with it is said elsewhere
        return object
    return found if inspect.isclass(found) else object


def is_a(path: str, names: Collection[str]) -> bool:
    """Tell whether a path names one of these classes, or one that is derived from it."""
    return path in names or any(f"{each.__module__}.{each.__qualname__}" in names for each in class_of(path).__mro__)


def takes(target: Callable[..., Any], name: str) -> bool:
    """Tell whether a callable may be given an argument of this name: it has one, or takes any."""
    try:
        parameters = [inspect.signature(target, follow_wrapped=is_followed).parameters for is_followed in (True, False)]
    except (TypeError, ValueError):  # some C extensions have no signature
        return True
    return any(name in each or any(item.kind is item.VAR_KEYWORD for item in each.values()) for each in parameters)


def accepts(target: Callable[..., Any], name: str) -> bool:
    """Tell whether a callable has an argument of this name; a class that passes on others (`**kwargs`) has its bases' too."""
    bases = target.__mro__ if inspect.isclass(target) else ()
    for make in [target, *(vars(base)["__init__"] for base in bases if "__init__" in vars(base))]:
        try:
            parameters = inspect.signature(make).parameters
        except (TypeError, ValueError):
            return False
        if name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            return True
        if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
            return False
    return False
