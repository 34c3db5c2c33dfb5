"""What a class or function of ddp_train or torch takes, read from its source: importing it would import torch, which takes seconds.

What comes back stands in for the object where only its place, name and arguments are asked for (`target.py`). Only what is plain in the
source is read: one definition by its name, perhaps handed on by other modules, with arguments whose defaults are literals. Everything
else, and every other package, is imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from ddp_train import FOLDER

_ROOTS = ("ddp_train", "torch")
_REQUIRED = {*_ROOTS, "numpy", "rich", "tensorboard", "xxhash"}  # of pyproject.toml: what a module of ours may import, and it is there
_HANDED_ON = 8  # times at most, from module to module
_INSTALLED = ("site-packages", "dist-packages")


def stand_in(path: str) -> Any | None:
    """Return what stands in for the object that a dotted path names; None where it has to be imported."""
    if "torch" in sys.modules or path.partition(".")[0] not in _ROOTS:
        return None  # what is there costs nothing
    return read(path)


@cache
def read(path: str) -> Any | None:
    """Return what stands in for an object, also where it could be had for nothing."""
    module_path, _, name = path.rpartition(".")
    try:
        module, node = _definition(_module(module_path), name)
        return _class(module, node) if isinstance(node, ast.ClassDef) else _function(module, node)
    except (_Unclear, OSError, SyntaxError, ValueError):
        return None


def read_class(path: str) -> type | None:
    """Return what stands in for a class, or for the one that a function says it returns, with its bases and its plain attributes.

    Those of torch have none: their names say what they are. None: it has to be imported.
    """
    if "torch" in sys.modules or path.partition(".")[0] not in _ROOTS:
        return None
    module_path, _, name = path.rpartition(".")
    try:
        module, node = _definition(_module(module_path), name)
        if isinstance(node, ast.FunctionDef):
            return _lineage(module, node.returns) if node.returns is not None else object
        return _derived(module, node) if isinstance(node, ast.ClassDef) else None
    except (_Unclear, OSError, SyntaxError, ValueError):
        return None


class _Unclear(Exception):
    """The source does not say it plainly."""


@dataclass(frozen=True)
class _Module:
    """The source of a module: what its top level defines, and under which names it imports what."""

    name: str
    is_package: bool
    defined: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str]]  # name -> module, and what of it ("": the module itself)

    def resolve(self, node: ast.ImportFrom) -> str:
        """Return the module that `from ... import` names."""
        return resolve_name("." * node.level + (node.module or ""), self.name if self.is_package else self.name.rpartition(".")[0])


@cache
def _module(name: str) -> _Module:
    """Read a module of ours or of torch.

    Raises:
        _Unclear: it is none of those, or no file of Python.
    """
    root, *parts = name.split(".")
    top = FOLDER if root == FOLDER.name else _installed(root)
    file = top.joinpath(*parts, "__init__.py")
    is_package = file.is_file()
    file = file if is_package else top.joinpath(*parts).with_suffix(".py")
    if not file.is_file():
        raise _Unclear(name)
    module = _Module(name, is_package, {}, {})
    statements = ast.parse(file.read_bytes()).body
    if root == FOLDER.name and not all(map(_is_sure, statements)):
        raise _Unclear(name)
    for node in statements:
        for target in _names_of(node):
            module.defined.setdefault(target, []).append(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                module.imported[alias.asname or first] = (alias.name if alias.asname else first, "")
        elif isinstance(node, ast.ImportFrom):
            module.imported.update({each.asname or each.name: (module.resolve(node), each.name) for each in node.names})
    return module


def _is_sure(node: ast.stmt) -> bool:
    """Tell whether a statement on the top level of a module of ours cannot fail, as one can that needs an optional package."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        packages = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        return all(name.partition(".")[0] in _REQUIRED | sys.stdlib_module_names for name in packages)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return is_text or is_for_types or isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign))


def _installed(root: str) -> Path:
    spec = PathFinder.find_spec(root) if root in _ROOTS else None
    if spec is None or spec.origin is None or not set(_INSTALLED) & set(Path(spec.origin).parts):
        raise _Unclear(root)
    return Path(spec.origin).parent


def _names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (each.id for each in node.targets if isinstance(each, ast.Name))
    else:  # it may define anything
        yield from (each.name for each in ast.walk(node) if isinstance(each, (ast.ClassDef, ast.FunctionDef)))


def _definition(module: _Module, name: str, *, handed_on: int = 0) -> tuple[_Module, ast.stmt]:
    """Find the one statement that defines a name, in the module where it stands."""
    if len(nodes := module.defined.get(name, [])) == 1 and name not in module.imported:
        return module, nodes[0]
    if nodes or name not in module.imported or not module.imported[name][1] or handed_on == _HANDED_ON:
        raise _Unclear(f"{module.name}.{name}")
    source, its_name = module.imported[name]
    return _definition(_module(source), its_name, handed_on=handed_on + 1)


def _class(module: _Module, node: ast.ClassDef) -> type:
    home, init = _constructor(module, node)
    members: dict[str, Any] = {"__module__": module.name, "__qualname__": node.name}
    if init is not None:
        members["__init__"] = _function(home, init)
    return type(node.name, (), members)


def _derived(module: _Module, node: ast.ClassDef) -> type:
    bases = tuple(_lineage(module, base) for base in node.bases[:1])  # of several the first: it is the one to be, others are added to it
    plain = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
    members = {name: each.value.value for each in plain for name in _names_of(each) if isinstance(each.value, ast.Constant)}
    return type(node.name, bases, {**members, "__module__": module.name, "__qualname__": node.name})


def _lineage(module: _Module, node: ast.expr) -> type:
    """Return the class that an expression in a module names, with its bases as far as they are ours."""
    first, _, rest = ast.unparse(node).partition(".")
    if (not rest and first in module.defined) or module.imported.get(first, ("",))[0].partition(".")[0] == FOLDER.name:
        home, found = _definition(module, first)
        return _derived(home, found) if isinstance(found, ast.ClassDef) else object
    source, its_name = module.imported.get(first, ("builtins", first))
    *parts, name = ".".join(filter(None, (source, its_name, rest))).split(".")
    return type(name, (), {"__module__": ".".join(parts)})


def _constructor(module: _Module, node: ast.ClassDef) -> tuple[_Module, ast.FunctionDef | None]:
    """Find `__init__` in a class or in the one that it is derived from; None: it has none."""
    if node.decorator_list or node.keywords:
        raise _Unclear(f"{module.name}.{node.name}")
    own = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    if any(each.name == "__new__" for each in own):
        raise _Unclear(f"{module.name}.{node.name}")
    for each in own:
        if each.name == "__init__":
            return module, each
    if not node.bases:
        return module, None
    if len(node.bases) > 1 or not isinstance(node.bases[0], ast.Name):
        raise _Unclear(f"{module.name}.{node.name}")
    base_module, base = _definition(module, node.bases[0].id)
    if not isinstance(base, ast.ClassDef):
        raise _Unclear(f"{module.name}.{node.name}")
    return _constructor(base_module, base)


def _function(module: _Module, node: ast.stmt) -> Any:
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        raise _Unclear(module.name)

    def found(*arguments: Any, **named: Any) -> None:
        raise AssertionError(f"{node.name} was read, not imported")

    given = node.args
    parameters = list(_parameters(given))
    try:
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        hints = {each.arg: _value(each.annotation, module) for each in every if each.annotation is not None}
    except Exception:  # a name that exists only for type checkers, say
        raise _Unclear(module.name) from None
    found.__module__, found.__name__, found.__qualname__ = module.name, node.name, node.name
    found.__annotations__ = hints
    found.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect looks for it
    return found


def _parameters(given: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    placed = [*((each, kinds.POSITIONAL_ONLY) for each in given.posonlyargs), *((each, kinds.POSITIONAL_OR_KEYWORD) for each in given.args)]
    none = [None] * (len(placed) - len(given.defaults))
    for (each, kind), default in zip(placed, [*none, *given.defaults], strict=True):
        yield inspect.Parameter(each.arg, kind, default=_default(default))
    if given.vararg is not None:
        yield inspect.Parameter(given.vararg.arg, kinds.VAR_POSITIONAL)
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield inspect.Parameter(each.arg, kinds.KEYWORD_ONLY, default=_default(default))
    if given.kwarg is not None:
        yield inspect.Parameter(given.kwarg.arg, kinds.VAR_KEYWORD)


def _default(node: ast.expr | None) -> Any:
    """Return a default; one that is no literal is a ValueError."""
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)


def _value(annotation: ast.expr, module: _Module) -> Any:
    """Return the type that an annotation names."""
    node = (
        ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
        else annotation
    )
    return eval(compile(ast.Expression(node), module.name, "eval"), {"__builtins__": {}}, _Names(module))


class _Names(dict[str, Any]):
    """What names mean in a module, found when they are asked for. Classes that are not Python's own are empty ones of the same name."""

    def __init__(self, module: _Module) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        module = self._module
        if name in module.defined:
            return _meaning(*_definition(module, name))
        if name not in module.imported:
            return getattr(builtins, name)
        source, its_name = module.imported[name]
        if source.partition(".")[0] in sys.stdlib_module_names:
            found = importlib.import_module(source)
            return getattr(found, its_name) if its_name else found
        if source.partition(".")[0] in _ROOTS and its_name:
            try:
                return _meaning(*_definition(module, name))
            except _Unclear:
                return _empty(its_name)
        return _empty(its_name or source)


class _Empty(type):
    """The type of what is not imported: a class, or a module, which has what it is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _empty(name)


def _meaning(module: _Module, node: ast.stmt) -> Any:
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        return _value(node.value, module)
    return _empty(str(getattr(node, "name", "")))


def _empty(name: str) -> type:
    return _Empty(name, (), {"__class_getitem__": classmethod(types.GenericAlias)})
