"""Find the object that a `_target_` names: import it, or read a stub of it from its source.

Importing a class of ddp_train or torch imports torch, which takes seconds (docs/decisions/0078-a-quick-start.md). So `look_up`
parses its source and makes an empty class or function of the same module, name, arguments and bases: `target.py` needs no more. It does so
while torch is not imported, and where the source is plain: one definition of the name, perhaps re-exported by other modules, with literals
as defaults. Everything else, and every other package, is imported.
"""

import ast
import builtins
import collections.abc
import difflib
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from ddp_train import FOLDER
from ddp_train.config.tree import ComponentConfig
from ddp_train.traits import Declared, constants_of

_ROOTS = ("ddp_train", "torch")
_REQUIRED = {*_ROOTS, "numpy", "rich", "tensorboard", "xxhash"}  # of pyproject.toml: modules of ours can always import these
_MAX_REEXPORTS = 8  # from module to module
_INSTALLED = ("site-packages", "dist-packages")
_TYPES = {name: vars(collections.abc)[name] for name in ("Sequence", "Iterable", "Mapping")}  # types that `target.fits` distinguishes
_imports = True


class NeedsImport(BaseException):
    """An import is needed where none is allowed. No Exception: those are reported as errors of a component."""


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

    Raises ImportError: a module does not exist or does not have the name; the message names it, and the nearest name.
    Raises NeedsImport: see `importing_nothing`.
    """
    if not _imports:
        raise NeedsImport(path)
    parts = path.split(".")
    if parts[0] == "__main__":  # a script, or a notebook's cells
        fix = f"put it into a file (in a notebook: %%writefile my_file.py) and name my_file.{parts[-1]}"
        raise ImportError(f"the training processes cannot import it from this program; {fix}")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            located: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise  # the module exists; something that it imports does not
            continue
        for name in parts[length:]:
            if not hasattr(located, name):
                close = difflib.get_close_matches(name, dir(located), n=1)
                hint = f"; did you mean {'.'.join(parts[: parts.index(name)])}.{close[0]}?" if close else ""
                raise ImportError(f"{module_name} has no {name!r}{hint}")
            located = getattr(located, name)
        return located
    hint = f"; a path begins with its module, as my_file.{path}" if len(parts) == 1 else ""
    raise ImportError(f"there is no module {parts[0]!r} here (looked in the current folder and in the installed packages){hint}")


def look_up(path: str) -> Any:
    """Return the object that a dotted path names; or a stub, enough for its arguments, where importing it would import torch."""
    imports_torch = "torch" not in sys.modules and path.partition(".")[0] in _ROOTS
    return (stub_from_source(path) if imports_torch else None) or locate(path)


def look_up_or_none(path: Any) -> Any:
    """Return the object that a `_target_` names; None: `check_target` reports an error."""
    try:
        return look_up(path) if isinstance(path, str) else None
    except Exception:  # a user's module may raise anything while it is imported
        return None


def class_of(path: str) -> type:
    """Return the class that a dotted path names, or that its function is annotated to return, with its bases and plain attributes.

    `object`: the class is not known.
    """
    try:
        target = look_up(path)
        cls = target if inspect.isclass(target) else typing.get_type_hints(target).get("return")
    except Exception:  # errors are reported elsewhere
        return object
    return cls if inspect.isclass(cls) else object


def class_constants(component_config: ComponentConfig, declared: type[Declared]) -> Declared:
    """Return the constants of the class that a component config names; a class that is not known has the defaults."""
    return constants_of(class_of(str(component_config.get("_target_"))), declared)


def constants_of_ours(component_config: ComponentConfig, declared: type[Declared]) -> Declared:
    """Return the constants of a class of ours, which is read and never imported; another's class has the defaults."""
    return constants_of(stub_from_source(str(component_config.get("_target_"))), declared)


class _Unclear(Exception):
    """The source is not plain enough to read."""


class _Module(NamedTuple):
    """The source of a module: its top-level definitions and imports."""

    name: str
    defined: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str]]  # name -> module, and the name in it ("": the module itself)
    bases: dict[str, type]  # classes of it that others are derived from: one for all, also where two bases are derived from it


@cache
def stub_from_source(path: str) -> Any | None:
    """Return a stub of an object from its source, also if it could be imported at no cost; None: the source is not plain."""
    module_path, _, name = path.rpartition(".")
    try:
        module, statement = _definition(_module(module_path), name)
        if isinstance(statement, ast.ClassDef):
            home, init = _constructor(module, statement)
            return _derived(module, statement, {} if init is None else {"__init__": _function(home, init)})
        return _function(module, statement)
    except (_Unclear, OSError, SyntaxError, ValueError):
        return None


@cache
def _module(name: str) -> _Module:
    """Read a module of ours or of torch. Raises _Unclear: it is another module, or no Python file."""
    root, *parts = name.split(".")
    top = FOLDER if root == FOLDER.name else _installed(root)
    file = top.joinpath(*parts, "__init__.py")
    package = name if file.is_file() else name.rpartition(".")[0]
    file = file if package == name else top.joinpath(*parts).with_suffix(".py")
    if not file.is_file():
        raise _Unclear(name)
    module = _Module(name, {}, {}, {})
    statements = ast.parse(file.read_bytes()).body
    if root == FOLDER.name and not all(map(_cannot_fail, statements)):
        raise _Unclear(name)
    for statement in statements:
        for target in _names_of(statement):
            module.defined.setdefault(target, []).append(statement)
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                first = alias.name.partition(".")[0]
                module.imported[alias.asname or first] = (alias.name if alias.asname else first, "")
        elif isinstance(statement, ast.ImportFrom):
            source = resolve_name("." * statement.level + (statement.module or ""), package)
            module.imported.update({alias.asname or alias.name: (source, alias.name) for alias in statement.names})
    return module


def _cannot_fail(statement: ast.stmt) -> bool:
    """Tell whether a top-level statement of a module of ours cannot fail, as an import of an optional package can."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        packages = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [alias.name for alias in statement.names]
        return all(name.partition(".")[0] in _REQUIRED | sys.stdlib_module_names for name in packages)
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_for_types = isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return is_text or is_for_types or isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign))


def _installed(root: str) -> Path:
    spec = PathFinder.find_spec(root) if root in _ROOTS else None
    if spec is None or spec.origin is None or not set(_INSTALLED) & set(Path(spec.origin).parts):
        raise _Unclear(root)
    return Path(spec.origin).parent


def _names_of(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield statement.name
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
    else:  # it may define anything
        yield from (inner.name for inner in ast.walk(statement) if isinstance(inner, (ast.ClassDef, ast.FunctionDef)))


def _definition(module: _Module, name: str, *, reexports: int = 0) -> tuple[_Module, ast.stmt]:
    """Find the only statement that defines a name, and its module."""
    if len(found := module.defined.get(name, [])) == 1 and name not in module.imported:
        return module, found[0]
    if found or name not in module.imported or not module.imported[name][1] or reexports == _MAX_REEXPORTS:
        raise _Unclear(f"{module.name}.{name}")
    source, its_name = module.imported[name]
    return _definition(_module(source), its_name, reexports=reexports + 1)


def _derived(module: _Module, statement: ast.ClassDef, members: dict[str, Any]) -> type:
    """Return a class with its attributes that are literals, and its bases; bases of torch have none themselves: their names are enough."""
    bases = tuple(_lineage(module, base) for base in statement.bases)
    attributes: dict[str, Any] = {}
    for line in statement.body:
        if isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value is not None:
            with suppress(ValueError, TypeError):
                attributes |= dict.fromkeys(_names_of(line), ast.literal_eval(line.value))
    return type(statement.name, bases, {**attributes, **members, "__module__": module.name, "__qualname__": statement.name})


def _lineage(module: _Module, expression: ast.expr) -> type:
    """Return the class that an expression in a module names, with its bases as far as they are ours."""
    first, _, rest = ast.unparse(expression).partition(".")
    if (not rest and first in module.defined) or module.imported.get(first, ("",))[0].partition(".")[0] == FOLDER.name:
        home, definition = _definition(module, first)
        if not isinstance(definition, ast.ClassDef):
            raise _Unclear(f"{home.name}.{first}")
        return home.bases.setdefault(definition.name, _derived(home, definition, {}))
    source, its_name = module.imported.get(first, ("builtins", first))
    *parts, name = ".".join(filter(None, (source, its_name, rest))).split(".")
    return type(name, (), {"__module__": ".".join(parts)})


def _constructor(module: _Module, statement: ast.ClassDef) -> tuple[_Module, ast.FunctionDef | None]:
    """Find `__init__` in a class or its base; None: there is none."""
    methods = {method.name: method for method in statement.body if isinstance(method, ast.FunctionDef)}
    if not (statement.decorator_list or statement.keywords or "__new__" in methods):
        if "__init__" in methods or not statement.bases:
            return module, methods.get("__init__")
        if len(statement.bases) == 1 and isinstance(statement.bases[0], ast.Name):
            home, base = _definition(module, statement.bases[0].id)
            if isinstance(base, ast.ClassDef):
                return _constructor(home, base)
    raise _Unclear(f"{module.name}.{statement.name}")


def _function(module: _Module, statement: ast.stmt) -> Any:
    if not isinstance(statement, ast.FunctionDef) or statement.decorator_list:
        raise _Unclear(module.name)
    arguments = statement.args
    for default in filter(None, (*arguments.defaults, *arguments.kw_defaults)):
        ast.literal_eval(default)  # one that is no literal is a ValueError
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef {statement.name}({ast.unparse(arguments)}): ...", namespace)
    function = namespace[statement.name]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    function.__module__ = module.name
    function.__annotations__ = {item.arg: _type(item.annotation, module) for item in every if item.annotation is not None}
    if statement.returns is not None:
        with suppress(_Unclear):
            function.__annotations__["return"] = _lineage(module, statement.returns)
    return function


def _type(expression: ast.expr, module: _Module) -> Any:
    """Return the type that an annotation names, without its arguments. A class that is not a builtin becomes an empty one of that name."""
    if isinstance(expression, ast.Constant):
        return _type(ast.parse(expression.value, mode="eval").body, module) if isinstance(expression.value, str) else type(expression.value)
    if isinstance(expression, ast.BinOp):
        return _type(expression.left, module) | _type(expression.right, module)
    first, _, rest = ast.unparse(expression.value if isinstance(expression, ast.Subscript) else expression).partition(".")
    name = rest.rpartition(".")[2] or first
    if first not in module.defined.keys() | module.imported.keys() and not hasattr(builtins, first):
        raise _Unclear(f"{module.name}.{first}")  # a name that exists only for type checkers, say
    if isinstance(expression, ast.Subscript) and name in ("Literal", "Optional", "Union"):
        inside = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
        members = [ast.literal_eval(member) if name == "Literal" else _type(member, module) for member in inside]
        special_form: Any = getattr(typing, name)
        return special_form[members[0] if name == "Optional" else tuple(members)]
    if not rest and name != "Tensor":  # which would read all of torch/__init__.py
        definition: ast.stmt | None = None
        with suppress(_Unclear):
            module, definition = _definition(module, first)
        if isinstance(definition, (ast.Assign, ast.AnnAssign)) and isinstance(definition.value, (ast.Subscript, ast.BinOp, ast.Name)):
            return _type(definition.value, module)
    return _TYPES.get(name) or getattr(builtins, name, None) or type(name, (), {})
