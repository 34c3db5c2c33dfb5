"""The room of the loop: no function takes more without a name than a reader can hold in mind."""

from __future__ import annotations

import ast
from pathlib import Path

from ddp_train import training

MOST = 5


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters that have a place, not `self`: a call says what a keyword-only one is."""
    arguments = [*function.args.posonlyargs, *function.args.args, function.args.vararg]
    return [argument.arg for argument in arguments if argument is not None and argument.arg not in ("self", "cls")]


def too_long(source: str) -> list[str]:
    """Return the functions that take too many. The fields of a dataclass are no parameters."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [function.name for function in functions if len(parameters(function)) > MOST]


def test_no_function_of_the_room_takes_more_than_five_parameters() -> None:
    assert too_long("class One:\n    def two(self, a, /, b, c, d, e, *f): ...") == ["two"]
    assert too_long("def five(a, b, c, d, e, *, f, g): ...") == []
    modules = sorted(Path(training.__path__[0]).rglob("*.py"))
    assert len(modules) > 15
    assert {module.name: found for module in modules if (found := too_long(module.read_text()))} == {}
